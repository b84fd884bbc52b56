"""`firecaffe bench exchange`: times of the exchanges, the backend's all_reduce and the link."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse import ActionYesNo, Namespace
from rich.console import Console

from firecaffe.api.answer import make_console
from firecaffe.api.argument_checks import check_device
from firecaffe.api.exchange_rounds import MAX_WORLD_SIZE
from firecaffe.cli.arguments import Parser
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES, NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.choose import BYTES_PER_ELEMENT, Choice, choose
from firecaffe.exchange.route import find_route

if TYPE_CHECKING:
    from firecaffe.cluster.world import World
    from firecaffe.transport.link import MeasuredLink

USAGE = (
    "[--nproc-per-node N] [--exchanges all|a,b,…] [--compressors a,b,…] [-b 8] [-e 128M] [-f 2] "
    "[-n 7] [--no-shared-memory] [--link BITS_PER_S] [--json]"
)

NOTES = (
    "Options and columns are those of nccl-tests. Under torchrun the command measures that world.",
    "Every sum is checked before anything is timed, and in every repetition: sums of whole numbers "
    "exactly, sums in tree order also bit for bit. A compressed sum must be as near as its codec "
    "promises, and the same bits on all ranks. A wrong sum gives exit code 7.",
    "A time is that of the slowest rank; a row has the median, min and max. Exchanges take turns "
    "within each repetition. `/ native` is the median ratio to the backend's all_reduce.",
    "through: group (the backend's process group), memory (shared within a host), or both. wire: "
    "bytes one way through the busiest rank, without headers. algbw: size / time. busbw: algbw · "
    "2 (p - 1) / p. Both are in 10^9 bytes/s.",
    "The link is measured between rank 0 and the first rank of another node. of bound: the least "
    "time of any all-reduce on such links, 2 (p - 1) / p · size / link, over the time.",
    "auto, the last line, is what exchange.algorithm = auto would take at each size.",
)


def make_parser() -> Parser:
    parser = Parser(
        "bench exchange",
        USAGE,
        "Measure exchanges side by side with the backend's own all_reduce, and the link between "
        "two ranks.",
        notes=NOTES,
    )
    add = parser.add
    add("--nproc-per-node", type=int, metavar="N", help="ranks to start on this host; else 2")
    add(
        "--exchanges",
        default="all",
        metavar="A,B",
        help=f"all, or some of {', '.join((*EXCHANGES, 'hierarchical(INNER,OUTER)'))}",
    )
    add(
        "--compressors",
        type=str,
        metavar="A,B",
        help="codecs whose sums are timed too, as exchange.compressor has them",
    )
    size, count = "SIZE", "N"
    add(
        "-b",
        "--minbytes",
        default="8",
        metavar=size,
        help="smallest size, in bytes; K, M and G are of 1024",
    )
    add("-e", "--maxbytes", default="128M", metavar=size, help="largest size")
    add("-f", "--stepfactor", default=2, metavar=count, help="factor from size to size")
    add("-n", "--iters", default=7, metavar=count, help="repetitions that count")
    add("--device", default="auto", help="auto, cpu or cuda")
    add(
        "--link",
        type=str,
        metavar="RATE",
        help="rate of a rank's link, one way, in bits/s, as 200M or 2.5G (k is 1000); else as "
        "measured",
    )
    add(
        "--shared-memory",
        action=ActionYesNo(no_prefix="no-"),
        default=True,
        help="ranks of one host add in shared memory, as in training",
    )
    add(
        "--master-port", default=0, metavar="PORT", help="port at which ranks meet; 0: any free one"
    )
    add("--json", action="store_true", help="print one JSON object, complete")
    return parser


MOST_REPETITIONS = 1_000_000
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


def make_plan(options: Namespace) -> BenchPlan:
    """Parse the options. Raises RecipeError that names the wrong one."""
    if not 1 <= options.iters <= MOST_REPETITIONS:
        raise RecipeError(f"-n is {options.iters}; it must be 1 to {MOST_REPETITIONS:,}")
    check_device(options.device)
    least, most = parse_size("-b", options.minbytes), parse_size("-e", options.maxbytes)
    return BenchPlan(
        parse_exchanges(options.exchanges),
        () if options.compressors is None else parse_compressors(options.compressors),
        sizes(least, most, options.stepfactor),
        options.iters,
        options.device,
        None if options.link is None else parse_link(options.link),
        options.shared_memory,
    )


def parse_exchanges(text: str) -> tuple[str, ...]:
    """Parse `all` or `a,b,…`, each once; the control `native` is first. Raises RecipeError."""
    # Do not split at the comma of hierarchical(INNER,OUTER).
    names = list(EXCHANGES) if text == "all" else re.split(r",(?![^()]*\))", text)
    for name in names:
        if name in EXCHANGES:
            continue
        if parse_hierarchical(name) is None:
            raise RecipeError(
                f"--exchanges: no exchange {name!r}; it must be all, or some of "
                f"{', '.join(EXCHANGES)}, hierarchical(INNER,OUTER) with commas between"
            )
        try:
            find_schedule(name)
        except ValueError as error:
            raise RecipeError(f"--exchanges: {error}") from None
    return tuple(dict.fromkeys([NATIVE, *names]))


def parse_compressors(text: str) -> tuple[str, ...]:
    from firecaffe.gradients.compressors import COMPRESSORS

    names = text.split(",")
    for name in names:
        if name not in COMPRESSORS:
            raise RecipeError(
                f"--compressors: no compressor {name!r}; it must be some of "
                f"{', '.join(COMPRESSORS)} with commas between"
            )
    return tuple(dict.fromkeys(names))


def parse_size(word: str, text: str) -> int:
    """Parse a size in bytes; K, M and G are of 1024, as in nccl-tests. Raises RecipeError."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    size = int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else 0
    if size < BYTES_PER_ELEMENT or size % BYTES_PER_ELEMENT:
        raise RecipeError(
            f"{word} is {text!r}; it must be bytes, a multiple of {BYTES_PER_ELEMENT} "
            "(float32), as 8, 64K, 128M or 1G (K is 1024)"
        )
    return size


def parse_link(text: str) -> float:
    """Parse bits per second; k, M and G are of 1000. Raises RecipeError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)", text)
    rate = float(match[1]) * 1000 ** " kMG".index(match[2] or " ") if match else 0.0
    if rate <= 0:
        raise RecipeError(
            f"--link is {text!r}; it must be bits per second, as 200M or 2.5G (k is 1000)"
        )
    return rate


def sizes(least_bytes: int, most_bytes: int, factor: int) -> tuple[int, ...]:
    """Return sizes from the least to at most the most, growing by `factor`. Raises RecipeError."""
    if most_bytes < least_bytes:
        raise RecipeError(f"-e is {most_bytes}; it must be at least -b, which is {least_bytes}")
    if factor < 2:
        raise RecipeError(f"-f is {factor}; it must be a whole number, 2 or more")
    grown = [least_bytes]
    while grown[-1] * factor <= most_bytes:
        grown.append(grown[-1] * factor)
    return tuple(grown)


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
    import torch

    from firecaffe.cli.arguments import check_launched
    from firecaffe.cluster.hosts import Hosts
    from firecaffe.cluster.launcher import launch
    from firecaffe.cluster.world import is_launched

    options = make_parser().parse_args(argv)
    plan = make_plan(options)
    if is_launched():
        check_launched(make_parser(), argv, options.nproc_per_node)
        run_rank(plan, options.json)
        return 0
    ranks = RANKS if options.nproc_per_node is None else options.nproc_per_node
    _check_ranks(ranks, "--nproc-per-node")
    _check_memory(plan, ranks)
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("--device is cuda; this host shows no GPU (use cpu or auto)")
    sys.stdout.flush()
    launch(["bench", "exchange", *argv], Hosts(ranks, master_port=options.master_port))
    return 0


def run_rank(plan: BenchPlan, as_json: bool) -> None:
    import torch

    from firecaffe.cli.bench_exchange_report import show
    from firecaffe.cluster.agree import agree
    from firecaffe.cluster.world import join

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
    from firecaffe.cli.bench_exchange_report import make_report
    from firecaffe.cluster.agree import gather_text
    from firecaffe.cluster.world import TIMEOUT_S
    from firecaffe.measure.exchange_times import (
        conditions_since,
        make_encoders,
        read_counters,
        time_exchanges,
    )
    from firecaffe.runs.environment import describe_environment
    from firecaffe.transport.auto_exchange import rank_elsewhere
    from firecaffe.transport.link import measure_link
    from firecaffe.transport.local_ranks import meet_local_ranks

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


def _choices(plan: BenchPlan, world: World, link: MeasuredLink, *, shares: bool) -> list[Choice]:
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
    import psutil

    held = VECTORS_HELD + VECTORS_OF_COMPRESSOR * len(plan.compressors)
    # In shared memory each exchange needs a separate vector.
    held += len(plan.exchanges) if plan.shared_memory else 0
    needed_bytes = held * max(plan.sizes_bytes) * ranks
    host_bytes = psutil.virtual_memory().total
    if plan.device != "cuda" and needed_bytes > host_bytes:
        raise RecipeError(
            f"-e would take {needed_bytes / 1e9:,.1f} GB for {ranks} ranks; this host has "
            f"{host_bytes / 1e9:,.1f} GB"
        )
