"""One rank of `benchmarks.exchange.scaling`, on its emulated host: checks and times exchanges.

The first rank appends one JSON line for each size to the raw file as soon as it is known. Each
repetition has all exchanges that are due in turn, forth and back, short ones several times, and
every result is checked before its time is told.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World, join
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.measure.exchange_times import conditions_since, read_counters
from firecaffe.measure.known_sum import (
    check_exchanges,
    difference,
    raise_any_fault,
    summand,
    true_sum,
)
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.link import measure_link

CHECKED_ELEMENTS = (1, 97, 8191)
"""Lengths at which random numbers must come out with the bits of the tree."""


def main() -> None:
    plan = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with join("cpu") as world:
        used = {name for size in plan["sizes"] for name in size["repetitions"]}
        # Small vectors, so all can be interpreted by every rank.
        exchanges = {name: Exchange.of_vectors(world, name) for name in EXCHANGES if name in used}
        check_exchanges(world, lambda _: exchanges, CHECKED_ELEMENTS)
        link = measure_link(world, 0, 1)
        for size in plan["sizes"]:
            results, conditions = time_size(world, size)
            if world.is_first:
                line = {
                    **plan["context"],
                    "size_bytes": size["size_bytes"],
                    "alpha_s": link.latency_s,
                    "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                    "conditions": conditions,
                    "results": results,
                    "not_run": size["not_run"],
                }
                with Path(plan["raw"]).open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"  {size['size_bytes'] / 1e6:g} MB: {_in_words(results)}", flush=True)


def time_size(world: World, size: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Samples of every exchange (those of the slowest rank), and what the machine did meanwhile.

    Raises: NotIdenticalError, on every rank, where a sum is wrong.
    """
    count: dict[str, int] = size["repetitions"]
    exchanges = {name: Exchange.of_vectors(_with_own_links(world), name) for name in count}
    num_elements = size["size_bytes"] // BYTES_PER_ELEMENT
    own = summand(world.rank, world.world_size, num_elements)
    expected = true_sum(world.world_size, num_elements)
    calls: dict[str, int] = size["calls"]
    vectors = [torch.empty_like(own) for _ in range(max(calls.values()))]
    most = max(count.values())
    due = {name: {i * most // n for i in range(n)} for name, n in count.items()}
    for name in size["first_calls"]:
        due[name].add(-1)
    samples: dict[str, dict[int, tuple[float, int]]] = {name: {} for name in count}
    fault = ""
    before, interrupts_s = read_counters(), _interrupts_s()
    for repetition in range(-1, most):
        # Back and forth, so that nobody follows the same one every time.
        for name in list(count) if repetition % 2 == 0 else reversed(count):
            if repetition not in due[name]:
                continue
            summed = vectors[: calls[name]]
            for vector in summed:
                vector.copy_(own)
            sent_before = read_counters().retransmitted_segments or 0
            # No rank has this sum before all are here.
            dist.all_reduce(torch.zeros(1), group=world.group)
            start_s = time.perf_counter()
            for vector in summed:
                exchanges[name].all_reduce(vector)
            taken_s = (time.perf_counter() - start_s) / len(summed)
            again = (read_counters().retransmitted_segments or 0) - sent_before
            samples[name][repetition] = taken_s, again
            for vector in summed:
                if not fault and not torch.equal(vector, expected):
                    fault = f"{name}, {size['size_bytes']} bytes: {difference(vector, expected)}"
        if repetition < 0:
            raise_any_fault(world, fault)
            before, interrupts_s = read_counters(), _interrupts_s()
    seen, softirq_s = conditions_since(before), _interrupts_s() - interrupts_s
    raise_any_fault(world, fault)
    total_s = read_counters().total_cpu_s - before.total_cpu_s
    said = gather_text(world, json.dumps([samples, seen.process_cpu_share]))
    stated = [json.loads(text) for text in said]
    ranks_share = sum(share for _, share in stated)
    conditions = {
        "cpu_busy_share": seen.cpu_busy_share,
        "cpu_ranks_share": ranks_share,
        "cpu_interrupts_share": softirq_s / total_s,
        "retransmitted_segments": sum(
            again
            for of_rank, _ in stated
            for by_repetition in of_rank.values()
            for repetition, (_, again) in by_repetition.items()
            if int(repetition) >= 0
        ),
    }
    results = {}
    for name in count:
        by_rank = [of_rank[name] for of_rank, _ in stated]
        counted = sorted(due[name] - {-1})
        results[name] = {
            "repetitions": counted,
            "samples_s": [max(own[str(r)][0] for own in by_rank) for r in counted],
            "retransmits": [sum(own[str(r)][1] for own in by_rank) for r in counted],
        }
    return results, conditions


def _with_own_links(world: World) -> World:
    """A connection's window is what its last messages have left it. In a training, one exchange
    runs again and again and meets its own; here it is not to meet another exchange's.
    """
    return replace(world, exchange_group=dist.new_group(backend="gloo"))


def _interrupts_s() -> float:
    """Of all processors: most of what carries packets, and in no process's time."""
    times = psutil.cpu_times()
    return float(getattr(times, "softirq", 0.0) + getattr(times, "irq", 0.0))


def _in_words(results: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {sorted(result['samples_s'])[len(result['samples_s']) // 2]:.3f}"
        for name, result in results.items()
    )


if __name__ == "__main__":
    main()
