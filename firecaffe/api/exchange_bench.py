"""`firecaffe.bench_exchange`: exchanges beside the backend's all_reduce, and the link."""

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from firecaffe.api.answer import progress
from firecaffe.api.argument_checks import check_count, check_device, commas, wrong
from firecaffe.api.exchange_bench_report import ExchangeTimes, make_report
from firecaffe.api.exchange_rounds import MAX_WORLD_SIZE
from firecaffe.cluster.agree import agree, gather_json
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.hosts import Hosts
from firecaffe.cluster.process_settings import compute_threads
from firecaffe.cluster.world import TIMEOUT_S, World, is_launched, join
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES, NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.route import Choice, choose, find_route
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.measure.exchange_times import (
    conditions_since,
    make_encoders,
    read_counters,
    time_exchanges,
)
from firecaffe.resume_advice import option
from firecaffe.runs.environment import describe_environment
from firecaffe.script.launch import launch_on
from firecaffe.transport.auto_exchange import rank_elsewhere
from firecaffe.transport.link import MeasuredLink, measure_link
from firecaffe.transport.local_ranks import meet_local_ranks
from firecaffe.user_code import shown

MAX_REPETITIONS = 1_000_000
"""Most repetitions of a measurement: each time is stored."""


@dataclass(frozen=True)
class BenchPlan:
    """The measurements to make, equal on all ranks."""

    exchanges: tuple[str, ...]
    compressors: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    repetitions: int
    device: str
    link_bits_per_s: float | None
    shared_memory: bool


def parse_exchanges(text: str) -> tuple[str, ...]:
    """Parse `all` or `a,b,…`, each once; the control `native` is first. Raises RecipeError."""
    # Do not split at the comma of hierarchical(INNER,OUTER).
    names = list(EXCHANGES) if text == "all" else re.split(r",(?![^()]*\))", text)
    for name in names:
        if name in EXCHANGES:
            continue
        if parse_hierarchical(name) is None:
            raise RecipeError(
                f"{option('exchanges')}: no exchange {name!r}; it must be all, or some of "
                f"{', '.join(EXCHANGES)}, hierarchical(INNER,OUTER) with commas between"
            )
        try:
            find_schedule(name)
        except ValueError as error:
            raise RecipeError(f"{option('exchanges')}: {error}") from None
    return tuple(dict.fromkeys([NATIVE, *names]))


def parse_compressors(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in COMPRESSORS:
            raise RecipeError(
                f"{option('compressors')}: no compressor {name!r}; it must be some of "
                f"{', '.join(COMPRESSORS)} with commas between"
            )
    return tuple(dict.fromkeys(names))


def parse_size(name: str, typed: int | str) -> int:
    """Parse a size in bytes; K, M and G are of 1024, as in nccl-tests. Raises RecipeError."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", str(typed))
    size = int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else 0
    if size < BYTES_PER_ELEMENT or size % BYTES_PER_ELEMENT:
        multiple = f"a multiple of {BYTES_PER_ELEMENT} (float32)"
        raise wrong(name, repr(typed), f"bytes, {multiple}, as 8, 64K, 128M or 1G (K is 1024)")
    return size


def parse_link(text: str) -> float:
    """Parse bits per second; k, M and G are of 1000. Raises RecipeError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)", text)
    rate = float(match[1]) * 1000 ** " kMG".index(match[2] or " ") if match else 0.0
    if rate <= 0:
        raise wrong("link", repr(text), "bits per second, as 200M or 2.5G (k is 1000)")
    return rate


def sizes(least_bytes: int, most_bytes: int, factor: int) -> tuple[int, ...]:
    """Return sizes from the least to at most the most, growing by `factor`. Raises RecipeError."""
    if most_bytes < least_bytes:
        right = f"at least {option('minbytes')}, which is {least_bytes}"
        raise wrong("maxbytes", most_bytes, right)
    check_count("stepfactor", factor, 2)
    grown = [least_bytes]
    while grown[-1] * factor <= most_bytes:
        grown.append(grown[-1] * factor)
    return tuple(grown)


THREADS = 1
"""Threads of each rank, as in training by default."""
VECTORS_HELD = 4
"""Largest vectors in each rank, at least: its input, the result, the true sum, received data."""
VECTORS_OF_COMPRESSOR = 4
"""Further vectors per compressor: the input, its memory, the decoded one, the total."""


@from_script
def bench_exchange(
    *,
    nproc_per_node: int = 2,
    exchanges: str | Sequence[str] = "all",
    compressors: str | Sequence[str] | None = None,
    minbytes: int | str = 8,
    maxbytes: int | str = "128M",
    stepfactor: int = 2,
    iters: int = 7,
    device: str = "auto",
    link: int | float | str | None = None,
    shared_memory: bool = True,
    master_port: int = 0,
) -> ExchangeTimes | None:
    """Measure exchanges in turns with the backend's own all_reduce, and check every sum.

    In a launcher's world each rank calls it; ranks other than the first get None.

    Args:
        nproc_per_node: The number of ranks to start on this host.
        exchanges: "all", or the names of exchanges.
        compressors: Codecs whose sums are timed too.
        minbytes: The smallest size in bytes, or a text as "64K" (K, M and G are of 1024).
        maxbytes: The largest size.
        stepfactor: The factor from size to size.
        iters: Repetitions that count.
        device: auto, cpu or cuda.
        link: A rank's link, one way, in bits/s, or a text as "2.5G"; else as measured.
        shared_memory: Ranks of one host add in shared memory, as in training.
        master_port: The port at which ranks meet; 0 takes any.

    Raises: RecipeError for a wrong argument; NotIdenticalError if a sum is wrong.
    """
    check_count("iters", iters, 1, MAX_REPETITIONS)
    check_device(device)
    check_count("master_port", master_port, 0)
    if not isinstance(shared_memory, bool):
        raise wrong("shared_memory", shown(shared_memory), "True or False")
    least, most = parse_size("minbytes", minbytes), parse_size("maxbytes", maxbytes)
    plan = BenchPlan(
        parse_exchanges(commas("exchanges", exchanges)),
        () if compressors is None else parse_compressors(commas("compressors", compressors)),
        sizes(least, most, stepfactor),
        iters,
        device,
        None if link is None else parse_link(str(link)),
        shared_memory,
    )
    if is_launched():
        return run_rank(plan)
    check_count("nproc_per_node", nproc_per_node, 2)
    _check_ranks(nproc_per_node, option("nproc_per_node"))
    _check_memory(plan, nproc_per_node)
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"{option('device')} is cuda; this host shows no GPU (use cpu or auto)")
    return launch_on(Hosts(nproc_per_node, master_port=master_port), run_rank, [plan])


def run_rank(plan: BenchPlan) -> ExchangeTimes | None:
    """Measure with all ranks of this world; only rank 0 returns an answer."""
    with compute_threads(THREADS), join(plan.device) as world:
        _check_ranks(world.world_size, "WORLD_SIZE")
        _check_memory(plan, world.local_world_size)
        _check_hosts(plan, world)
        agree(world, {"bench options": json.dumps(asdict(plan)), "torch": torch.__version__})
        report = _measure(plan, world, progress("measuring", world.is_first))
        return ExchangeTimes(report) if world.is_first else None


def _measure(plan: BenchPlan, world: World, say: Callable[[str], None]) -> dict[str, Any]:
    # torchrun numbers its agents; hosts of other launchers differ by name.
    stated = gather_json(world, [describe_environment(), os.environ.get("GROUP_RANK", "")])
    nodes = [(environment["host"], group_rank) for environment, group_rank in stated]
    say("the link")
    # Measure the network to another node if there is one, else the way to the next process.
    link = measure_link(world, 0, rank_elsewhere(nodes))
    before = read_counters()
    is_shared = plan.shared_memory and world.device.type == "cpu"
    local = meet_local_ranks(world, TIMEOUT_S) if is_shared else None
    with nullcontext() if local is None else closing(local):
        timings = time_exchanges(
            world,
            plan.exchanges,
            plan.sizes_bytes,
            plan.repetitions,
            say,
            local,
            make_encoders(plan.compressors),
        )
    conditions = gather_json(world, asdict(conditions_since(before)))
    return make_report(
        timings,
        link,
        plan.link_bits_per_s,
        device=world.device.type,
        threads=THREADS,
        nodes=nodes,
        environments=[environment for environment, _ in stated],
        conditions=conditions,
        choices=_choices(plan, world, link, shares=local is not None),
    )


def _choices(plan: BenchPlan, world: World, link: MeasuredLink, *, shares: bool) -> list[Choice]:
    """Return the choice of `auto` for each size, as if a step's vectors all had that size."""
    ranks, size = world.world_size, world.local_world_size
    senders = find_route("tree", None, ranks, size, shared_memory=shares).senders
    alpha_s, rate = link.latency_s, link.bandwidth_bytes_per_s
    return [choose(ranks, [size], alpha_s, rate, senders) for size in plan.sizes_bytes]


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
            raise RecipeError(f"{option('exchanges')}: {error}") from None


def _check_memory(plan: BenchPlan, ranks: int) -> None:
    held = VECTORS_HELD + VECTORS_OF_COMPRESSOR * len(plan.compressors)
    # In shared memory each exchange needs a separate vector.
    held += len(plan.exchanges) if plan.shared_memory else 0
    needed_bytes = held * max(plan.sizes_bytes) * ranks
    host_bytes = psutil.virtual_memory().total
    if plan.device != "cuda" and needed_bytes > host_bytes:
        raise RecipeError(
            f"{option('maxbytes')} would take {needed_bytes / 1e9:,.1f} GB for {ranks} ranks; this "
            f"host has {host_bytes / 1e9:,.1f} GB"
        )
