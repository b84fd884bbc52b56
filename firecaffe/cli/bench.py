"""`firecaffe bench exchange`: times of the exchanges, the backend's all_reduce and the link."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import psutil
import torch
from rich.console import Console

from firecaffe.cli import bench_data, bench_step
from firecaffe.cli.bench_report import make_report, show
from firecaffe.cli.bench_words import BenchPlan, make_plan
from firecaffe.cli.console import make_console
from firecaffe.cli.launched import check_launched
from firecaffe.cli.options.bench_exchange import make_parser
from firecaffe.cli.schedule import MAX_WORLD_SIZE
from firecaffe.cluster.agree import agree, gather_text
from firecaffe.cluster.hosts import Hosts
from firecaffe.cluster.launch import launch
from firecaffe.cluster.world import TIMEOUT_S, World, is_launched, join
from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.exchange.choose import Choice, choose
from firecaffe.exchange.route import find_route
from firecaffe.measure.conditions import conditions_since, read_counters
from firecaffe.measure.encoded_sum import make_encoders
from firecaffe.measure.exchange_times import time_exchanges
from firecaffe.runs.environment import describe_environment
from firecaffe.transport.auto_exchange import rank_elsewhere
from firecaffe.transport.link import Link, measure_link
from firecaffe.transport.local_ranks import meet_local_ranks

RANKS = 2
"""Number of ranks if neither --nproc-per-node nor a launcher gives it."""
THREADS = 1
"""Threads of each rank, as in training by default."""
VECTORS_HELD = 4
"""Largest vectors in each rank, at least: its input, the result, the true sum, received data."""
VECTORS_OF_COMPRESSOR = 4
"""Further vectors per compressor: the input, its memory, the decoded one, the total."""

PROGRESS_WIDTH = 24


def main(argv: list[str]) -> int:
    if argv[:1] == ["step"]:
        return bench_step.main(argv[1:])
    if argv[:1] == ["data"]:
        return bench_data.main(argv[1:])
    if argv[:1] != ["exchange"]:
        found = repr(argv[0]) if argv else "nothing"
        raise RecipeError(
            f"bench measures `exchange`, `step` or `data`, as in `bench exchange`; found {found}"
        )
    options = make_parser().parse_args(argv[1:])
    plan = make_plan(options)
    if is_launched():
        check_launched(make_parser(), argv[1:], options.nproc_per_node)
        run_rank(plan, options.json)
        return 0
    ranks = RANKS if options.nproc_per_node is None else options.nproc_per_node
    _check_ranks(ranks, "--nproc-per-node")
    _check_memory(plan, ranks)
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("--device is cuda; this host shows no GPU (use cpu or auto)")
    sys.stdout.flush()
    launch(["bench", *argv], Hosts(ranks, master_port=options.master_port))
    return 0


def run_rank(plan: BenchPlan, as_json: bool) -> None:
    torch.set_num_threads(THREADS)
    with join(plan.device) as world:
        _check_ranks(world.world_size, "WORLD_SIZE")
        _check_memory(plan, world.local_world_size)
        _check_hosts(plan, world)
        agree(world, {"bench options": json.dumps(asdict(plan)), "torch": torch.__version__})
        console = make_console()
        with _progress(console, shown=world.is_first and not as_json) as progress:
            report = _measure(plan, world, progress)
    if world.is_first:
        if as_json:
            print(json.dumps(report))
        else:
            show(report, console)


def _measure(plan: BenchPlan, world: World, progress: Callable[[str], None]) -> dict[str, Any]:
    # torchrun numbers its agents; hosts of other launchers differ by name.
    who = json.dumps([describe_environment(), os.environ.get("GROUP_RANK", "")])
    stated = [json.loads(text) for text in gather_text(world, who)]
    nodes = [(environment["host"], group_rank) for environment, group_rank in stated]
    progress("the link")
    # Measure the network to another node if there is one, else the way to the next process.
    link = measure_link(world, 0, rank_elsewhere(nodes))
    before = read_counters()
    is_shared = plan.shared_memory and world.device.type == "cpu"
    local = meet_local_ranks(world, TIMEOUT_S) if is_shared else None
    try:
        timings = time_exchanges(
            world,
            plan.exchanges,
            plan.sizes_bytes,
            plan.repetitions,
            progress,
            local,
            make_encoders(plan.compressors),
        )
    finally:
        if local is not None:
            local.close()
    conditions = gather_text(world, json.dumps(asdict(conditions_since(before))))
    return make_report(
        timings,
        link,
        plan.link_bits_per_s,
        device=world.device.type,
        threads=THREADS,
        nodes=nodes,
        environments=[environment for environment, _ in stated],
        conditions=[json.loads(text) for text in conditions],
        choices=_choices(plan, world, link, shares=local is not None),
    )


def _choices(plan: BenchPlan, world: World, link: Link, *, shares: bool) -> list[Choice]:
    """Return the choice of `auto` for each size, as if a step's vectors all had that size."""
    ranks, size = world.world_size, world.local_world_size
    senders = find_route("tree", None, ranks, size, shared_memory=shares).senders
    alpha_s, rate = link.latency_s, link.bandwidth_bytes_per_s
    return [choose(ranks, [size], alpha_s, rate, senders) for size in plan.sizes_bytes]


@contextmanager
def _progress(console: Console, shown: bool) -> Iterator[Callable[[str], None]]:
    if not (shown and console.is_terminal):
        yield lambda _: None
        return
    # No spinner: its thread would take processor time from the measurement.
    yield lambda what: console.print(f"measuring: {what:{PROGRESS_WIDTH}}", end="\r")
    console.print(" " * (PROGRESS_WIDTH + len("measuring: ")), end="\r")


def _check_ranks(ranks: int, word: str) -> None:
    if ranks < 2:
        raise RecipeError(f"{word} is {ranks}; an exchange needs at least 2 ranks")
    if ranks > MAX_WORLD_SIZE:
        raise RecipeError(f"{word} is {ranks}; it must be at most {MAX_WORLD_SIZE}")


def _check_hosts(plan: BenchPlan, world: World) -> None:
    for name in plan.exchanges:
        if name == NATIVE:
            continue
        try:
            find_schedule(name, world.local_world_size)(world.world_size, 1)
        except ValueError as error:
            raise RecipeError(f"--exchanges: {error}") from None


def _check_memory(plan: BenchPlan, ranks: int) -> None:
    held = VECTORS_HELD + VECTORS_OF_COMPRESSOR * len(plan.compressors)
    # In shared memory each exchange needs a separate vector.
    held += len(plan.exchanges) if plan.shared_memory else 0
    needed_bytes = held * max(plan.sizes_bytes) * ranks
    found_bytes = psutil.virtual_memory().total
    if plan.device != "cuda" and needed_bytes > found_bytes:
        raise RecipeError(
            f"-e would take {needed_bytes / 1e9:,.1f} GB for {ranks} ranks; this host has "
            f"{found_bytes / 1e9:,.1f} GB"
        )
