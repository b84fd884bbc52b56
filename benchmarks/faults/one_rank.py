"""What one rank's rounds take among many: `python -m benchmarks.faults.one_rank [RANKS]`."""

import argparse
import time
import tracemalloc
from statistics import median

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.schedule import Schedule

ELEMENTS = 7_000_000
REPETITIONS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="?", default=4096)
    world_size = parser.parse_args().ranks
    print("| algorithm | transfers of a rank | ms of a processor | peak MB |\n|---|---|---|---|")
    for name, algorithm in ALGORITHMS.items():
        schedule = algorithm(world_size, ELEMENTS)
        found = [measure(schedule, rank) for rank in (0, 1, world_size // 2 - 1, world_size - 1)]
        transfers, seconds, peak_bytes = (max(column) for column in zip(*found, strict=True))
        print(f"| `{name}` | {transfers} | {seconds * 1e3:.1f} | {peak_bytes / 1e6:.2f} |")


def measure(schedule: Schedule, rank: int) -> tuple[int, float, int]:
    """Transfers, the median of processor seconds, and the peak of traced memory."""
    samples_s = []
    for _ in range(REPETITIONS):
        start_s = time.process_time()
        own = list(schedule.rounds_of(rank))
        samples_s.append(time.process_time() - start_s)
    transfers = sum(len(each) for _, each in own)
    del own
    tracemalloc.start()
    list(schedule.rounds_of(rank))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return transfers, median(samples_s), peak_bytes


if __name__ == "__main__":
    main()
