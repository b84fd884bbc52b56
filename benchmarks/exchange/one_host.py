"""Ranks of one host: the sum in shared memory against Gloo's all_reduce and the tree over sockets.

    python -m benchmarks.exchange.one_host > benchmarks/results/one_host.md

Three ways in turn, in one process for each rank. `shared memory` is training's: the gradient lies
in memory that all ranks map, and the sum is read where it is. Before and after each turn the
vector is checked: the two trees must give the bits of the tree over random numbers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World, join
from firecaffe.exchange import NATIVE, tree
from firecaffe.exchange.leaves import tree_sum
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.measure.known_sum import difference, interpret, raise_any_fault
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks

SHARED, GLOO, SOCKETS = "shared memory", "Gloo's all_reduce", "tree over sockets"
COPY = "copy of one's own"
INTERPRETED_ELEMENTS = 100_003
TIMEOUT_S = 60.0
COLUMNS = (
    *("ranks", "MB", "way", "ms, median", "min", "max", "/ shared memory", "ratios", "n"),
    *("GB/s", "of a copy's"),
)

HEAD = """# Ranks of one host

    python -m benchmarks.exchange.one_host{arguments}

{cpu}, {cores} cores, torch {torch}, commit {commit}; one thread for each rank. Float32 vectors. A
time is that of the slowest rank. The ways take turns, forth and back; the ratio is the median over
repetitions of a way's time over that of shared memory in the same repetition (ratios: the least and
the largest). The sum in shared memory and the tree over sockets were the same bits in every
repetition: those of the tree over random numbers. Shared memory is in place: the vector lies in it
from the start, as a gradient does in training.

*Copy of one's own*: every rank copies such a vector at the same time, which is what the machine's
memory gives to so many processes. GB/s: what all ranks together read and write of their vectors,
2 bytes for each byte of a vector in a copy and in the sum in shared memory, in the median time;
what a write costs besides (lines that are read before) is in neither. *Of a copy's*: the share of
it, the median over repetitions.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sizes", nargs="+", type=int, default=[27_000_000, 230_000_000])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        run_rank(given.sizes, given.repetitions)
        return
    arguments = "".join(f" {argument}" for argument in sys.argv[1:])
    facts = {"cpu": cpu_name(), "torch": torch.__version__, "commit": commit()[:12]}
    cores = os.cpu_count()
    print(HEAD.format(arguments=arguments, cores=cores, **facts))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for ranks in given.ranks:
        for row in _start(ranks, given.sizes, given.repetitions):
            print(f"| {' | '.join(row)} |", flush=True)


def _start(ranks: int, sizes: list[int], repetitions: int) -> list[list[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.exchange.one_host", "--as-rank"]
    command += ["--repetitions", str(repetitions), "--sizes", *map(str, sizes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def run_rank(sizes: list[int], repetitions: int) -> None:
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    with join("cpu") as world:
        local = meet_local_ranks(world, TIMEOUT_S)
        if local is None:
            raise SystemExit("the ranks of this host cannot share memory")
        exchanges = {
            SHARED: Exchange.of_vectors(world, "tree", local),
            GLOO: Exchange.of_vectors(world, NATIVE),
            SOCKETS: Exchange.of_vectors(world, "tree"),
        }
        _check_bits(world, exchanges)
        for size_bytes in sizes:
            rows += _time(world, exchanges, size_bytes // BYTES_PER_ELEMENT, repetitions)
        exchanges[SHARED].close()
    if world.is_first:
        print(json.dumps(rows))


def _check_bits(world: World, exchanges: dict[str, Exchange]) -> None:
    """Raises: NotIdenticalError, where a sum is not that of the interpreted tree."""
    inputs = _random_vectors(world.world_size, INTERPRETED_ELEMENTS)
    schedule = tree.schedule(world.world_size, INTERPRETED_ELEMENTS)
    expected = interpret(schedule, inputs)[world.rank]
    faults = []
    for name, exchange in exchanges.items():
        vector = exchange.empty(INTERPRETED_ELEMENTS, torch.float32, world.device)
        vector.copy_(inputs[world.rank])
        dist.barrier(world.group)
        exchange.all_reduce(vector)
        faults.append(_fault(name, vector, expected))
    raise_any_fault(world, next(filter(None, faults), ""))


def _time(
    world: World, exchanges: dict[str, Exchange], num_elements: int, repetitions: int
) -> list[list[str]]:
    inputs = _random_vectors(world.world_size, num_elements)
    own = inputs[world.rank].clone()
    # That this fold has the bits of the interpreted tree is what the short vectors have shown.
    expected = tree_sum(inputs, lambda left, right: left.add_(right))
    del inputs
    vectors = {
        name: exchange.empty(num_elements, torch.float32, world.device)
        for name, exchange in exchanges.items()
    }
    ways: dict[str, Callable[[], object]] = {
        name: partial(exchange.all_reduce, vectors[name]) for name, exchange in exchanges.items()
    }
    vectors[COPY] = torch.zeros(num_elements)
    ways[COPY] = partial(vectors[COPY].copy_, own)
    samples_s: dict[str, list[float]] = {name: [] for name in ways}
    faults = []
    for repetition in range(-1, repetitions):
        for name in list(ways) if repetition % 2 == 0 else reversed(ways):
            vectors[name].copy_(own)
            # Not only all here, but none still reading what another writes.
            dist.barrier(world.group)
            start_s = time.perf_counter()
            ways[name]()
            taken_s = time.perf_counter() - start_s
            if repetition >= 0:
                samples_s[name].append(taken_s)
            faults.append(_fault(name, vectors[name], own if name == COPY else expected))
            dist.barrier(world.group)
    raise_any_fault(world, next(filter(None, faults), ""))
    stated = [json.loads(text) for text in gather_text(world, json.dumps(samples_s))]
    slowest = {
        name: [max(of_turn) for of_turn in zip(*(by_rank[name] for by_rank in stated), strict=True)]
        for name in ways
    }
    moved_bytes = 2 * num_elements * BYTES_PER_ELEMENT * world.world_size
    size = f"{num_elements * BYTES_PER_ELEMENT / 1e6:g}"
    return [
        [
            *(str(world.world_size), size, name, *_cells(of_way, slowest[SHARED])),
            *(_moved(of_way, slowest[COPY], moved_bytes) if name in (SHARED, COPY) else ("", "")),
        ]
        for name, of_way in slowest.items()
    ]


def _moved(samples_s: list[float], copies_s: list[float], moved_bytes: int) -> tuple[str, str]:
    shares = [copy / taken for copy, taken in zip(copies_s, samples_s, strict=True)]
    per_s = moved_bytes / statistics.median(samples_s)
    return f"{per_s / 1e9:.0f}", f"{statistics.median(shares):.0%}"


def _cells(samples_s: list[float], control_s: list[float]) -> list[str]:
    ratios = [taken / other for taken, other in zip(samples_s, control_s, strict=True)]
    return [
        *(f"{f(samples_s) * 1e3:.1f}" for f in (statistics.median, min, max)),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        str(len(samples_s)),
    ]


def _fault(name: str, vector: Tensor, expected: Tensor) -> str:
    """Empty where the vector is what it should be; Gloo's may differ by rounding."""
    if name == GLOO:
        close = torch.allclose(vector, expected, rtol=1e-4, atol=1e-5)
        return "" if close else f"{name}: the sum is wrong"
    same = torch.equal(vector, expected)
    return "" if same else f"{name}: {difference(vector, expected)}"


def _random_vectors(count: int, num_elements: int) -> list[Tensor]:
    return [
        torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))
        for rank in range(count)
    ]


if __name__ == "__main__":
    main()
