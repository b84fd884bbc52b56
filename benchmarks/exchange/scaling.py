"""Every exchange at 2 to 32 emulated hosts: FireCaffe's parameter server against reduction tree.

    python -m benchmarks.exchange.scaling --raw build/exchange.jsonl          # about 15 minutes
    python -m benchmarks.exchange.scaling --raw build/exchange.jsonl --hosts 8 --rates 1gbit
    python -m benchmarks.exchange.scaling --from build/exchange.jsonl         # the page alone

Appends to the raw file, then writes a page and a picture from all that is in it; what was timed
again replaces what was there. Needs what `benchmarks.emulated.virtual_cluster` needs, and a machine
that does nothing else.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulated.cluster_run import RunError
from benchmarks.emulated.namespaces import ClusterError
from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.exchange.page import write_page
from benchmarks.exchange.plan import Cell, choose_repetitions, predicted_s
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.runs.environment import commit, cpu_name

RESULTS = Path("benchmarks/results")
RUN_TIMEOUT_S = 1800.0


def main() -> int:
    given = _parser().parse_args()
    if given.from_raw is not None:
        write_page(given.from_raw, given.page)
        return 0
    if given.raw is None:
        print("error: --raw PATH is missing: where the JSON lines go", file=sys.stderr)
        return 1
    if min(given.hosts) < 2:
        print(f"error: --hosts has {min(given.hosts)}; an exchange needs 2", file=sys.stderr)
        return 1
    cells = [
        Cell(hosts, rate, size // BYTES_PER_ELEMENT * BYTES_PER_ELEMENT, algorithm)
        for hosts, rate, size, algorithm in product(
            given.hosts, given.rates, given.sizes, given.algorithms
        )
    ]
    not_run = {cell: cell.reason_not_to_run() for cell in cells}
    chosen = choose_repetitions(
        [cell for cell in cells if not not_run[cell]], given.budget_minutes * 60
    )
    print(f"at most about {predicted_s(chosen) / 60:.1f} minutes by the formulas", flush=True)
    given.raw.parent.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    try:
        for hosts, rate in product(given.hosts, given.rates):
            elapsed_s = time.monotonic() - start_s
            print(f"{elapsed_s:5.0f} s  {hosts} hosts, {rate / 1e6:g} Mbit/s", flush=True)
            here = [c for c in cells if (c.hosts, c.rate_bits_per_s) == (hosts, rate)]
            _run(hosts, rate, here, chosen, not_run, given.raw.resolve())
    except (ClusterError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - start_s:5.0f} s  done", flush=True)
    write_page(given.raw, given.page)
    return 0


def _run(
    hosts: int,
    rate: int,
    cells: Sequence[Cell],
    chosen: dict[Cell, int],
    not_run: dict[Cell, str],
    raw: Path,
) -> None:
    """One cluster, one start of its ranks, all sizes."""
    sizes: list[dict[str, Any]] = []
    for size_bytes in dict.fromkeys(cell.size_bytes for cell in cells):
        here = [cell for cell in cells if cell.size_bytes == size_bytes]
        run = [cell for cell in here if cell in chosen]
        sizes.append(
            {
                "size_bytes": size_bytes,
                "repetitions": {cell.algorithm: chosen[cell] for cell in run},
                "calls": {cell.algorithm: cell.calls for cell in run},
                "first_calls": [cell.algorithm for cell in run if cell.has_first_call],
                "not_run": {cell.algorithm: not_run[cell] for cell in here if not_run[cell]},
            }
        )
    context: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.exchange.scaling", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "hosts": hosts,
        "rate_bits_per_s": rate,
    }
    timed = [size for size in sizes if size["repetitions"]]
    if timed:
        with VirtualCluster(hosts, rate) as cluster:
            plan = {
                "sizes": timed,
                "context": {**context, "cluster": cluster.conditions()},
                "raw": str(raw),
            }
            command = [sys.executable, "-m", "benchmarks.exchange.rank", json.dumps(plan)]
            cluster.run(command, timeout_s=RUN_TIMEOUT_S, live=True)
    with raw.open("a") as file:
        for size in sizes:
            if not size["repetitions"]:
                line = {**context, "size_bytes": size["size_bytes"], "results": {}}
                file.write(json.dumps({**line, "not_run": size["not_run"]}) + "\n")
                print(f"  not run: {next(iter(size['not_run'].values()))}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", nargs="+", type=int, default=[2, 4, 8, 16, 32])
    add("--rates", nargs="+", type=parse_rate, default=[parse_rate("200mbit"), parse_rate("1gbit")])
    add("--sizes", nargs="+", type=int, default=[7_000_000, 28_000_000], help="in bytes")
    add("--algorithms", nargs="+", choices=EXCHANGES, default=list(EXCHANGES), metavar="NAME")
    add("--budget-minutes", type=float, default=18.0, help="repetitions: as many as fit, 3 to 7")
    add("--raw", type=Path, help="JSON lines are appended to this file")
    add("--from", dest="from_raw", type=Path, metavar="RAW", help="only write the page, from this")
    add("--page", type=Path, default=RESULTS / "exchange.md", help="the picture lies beside it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
