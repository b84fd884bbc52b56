"""`firecaffe check`: is this cluster what it should be, and what a plan needs to know of it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.arguments import Parser
from firecaffe.cli.bench_step import recipe_for
from firecaffe.cli.cluster_file import check_cluster_file, write_cluster
from firecaffe.cli.console import make_console
from firecaffe.cli.train import several_hosts
from firecaffe.cli.typed_network import NAME, network_of, network_words
from firecaffe.cluster.handover import handed
from firecaffe.errors import RecipeError
from firecaffe.recipe.parallel import layout_of

if TYPE_CHECKING:
    from firecaffe.cluster.world import World
    from firecaffe.measure.found_cluster import MeasuredCluster
    from firecaffe.measure.step_times import StepTimes
    from firecaffe.recipe.checked_recipe import CheckedRecipe
    from firecaffe.transport.local_ranks import LocalRanks

USAGE = (
    "[RECIPE.toml | --model NAME] [--nproc-per-node N] "
    "[--nnodes N --rdzv-endpoint HOST:PORT --rdzv-id NAME --secret-file FILE] "
    "[--write CLUSTER.toml [--overwrite]]"
)
ABOUT = (
    "Look a cluster over before a training: versions, clocks, memory, disks, every link between "
    "hosts, every rank's rate; who is slow is named. --write: the cluster file that `firecaffe "
    "plan` reads; with a recipe its steps and its exchange are measured too."
)


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser("check", USAGE, ABOUT, takes_recipe=True)
    add = parser.add
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start on this host")
    add("--write", type=str, default="", metavar="FILE", help="the cluster file to write")
    parser.add_overwrite()
    add("--folder", type=str, default=".", help="where files are written and read")
    add("--master-port", type=int, default=0, metavar="PORT", help="where ranks meet; 0: any")
    add("--json", action="store_true", help="print JSON")
    several_hosts(parser, "check")
    if not has_recipe:
        add = parser.add_group("without a recipe")
        add("--model", type=str, default="", metavar="NAME", help=NAME)
        network_words(add)
        add("--device", type=str, default="auto", help="auto, cpu or cuda")
    return parser


EXCHANGES = ("tree", "ring", "halving_doubling", "native")
STEP_S = 1.5
REPETITIONS = 5
LEFT_OUT = (
    "timed was the whole network on each rank, and the exchange of its gradients: of [parallel], "
    "exchanges of activations and the order of stages are left out; `firecaffe plan … --ways all` "
    "makes them of these figures"
)
"""What is said of a recipe whose workers hold one model together."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked of ranks."""

    recipe: CheckedRecipe | None
    options: Any


def main(argv: list[str]) -> int:
    import torch

    from firecaffe.cli.launched import check_launched
    from firecaffe.cluster.hosts import Hosts, parse_nodes
    from firecaffe.cluster.launcher import launch
    from firecaffe.cluster.world import is_launched
    from firecaffe.recipe.worker_numbers import check_hosts

    if isinstance(asked := handed(), Asked):
        run_rank(asked.recipe, asked.options)
        return 0
    recipe, options = _parse(argv)
    check_cluster_file(options)
    if is_launched(options.nnodes):
        check_launched(make_parser(), argv, options.nproc_per_node)
        run_rank(recipe, options)
        return 0
    if options.nproc_per_node < 1:
        raise RecipeError(f"--nproc-per-node is {options.nproc_per_node}; it must be at least 1")
    least, most = parse_nodes(options.nnodes)
    if recipe is not None:
        on_gpus = recipe.train.device != "cpu" and torch.cuda.is_available()
        check_hosts(recipe, options.nproc_per_node, least, most, on_gpus)
    hosts = Hosts(
        options.nproc_per_node,
        least,
        most,
        options.rdzv_endpoint,
        options.rdzv_id,
        options.master_port,
        options.secret_file,
    )
    sys.stdout.flush()
    launch(["check", *argv], hosts, for_ranks=Asked(recipe, options))
    return 0


def _parse(argv: list[str]) -> tuple[CheckedRecipe | None, Any]:
    from firecaffe.cli.typed_recipe import parse_recipe

    if make_parser().read(argv).positionals:
        return parse_recipe(make_parser(has_recipe=True), argv)
    options = make_parser().parse_args(argv)
    return (recipe_for(*network_of(options)) if options.model else None), options


def run_rank(recipe: CheckedRecipe | None, options: Any) -> None:
    """This rank's part; the first rank prints and writes."""
    import torch

    from firecaffe.cluster.agree import agree
    from firecaffe.cluster.world import join
    from firecaffe.measure.found_cluster import cluster_of, findings
    from firecaffe.measure.inventory import inventory_of

    torch.set_num_threads(1 if recipe is None else recipe.train.threads)
    device = options.device if recipe is None else recipe.train.device
    folder = Path(options.folder)
    if not folder.is_dir():
        raise RecipeError(f"--folder is {folder}; it must be a folder that is there")
    console = make_console()
    with join(device) as world:
        agree(world, {"check options": json.dumps(vars(options), default=str, sort_keys=True)})

        def say(what: str) -> None:
            if world.is_first and console.is_terminal and not options.json:
                console.print(f"checking: {what:30}", end="\r")

        found = _look(world, recipe, folder, say)
        inventory = None
        if recipe is not None and world.is_first:
            say("the network")
            inventory = inventory_of(recipe, world.device)
    if not world.is_first:
        return
    if options.write:
        path = Path(options.write)
        write_cluster(path, cluster_of(found, recipe, path.stem))
    if options.json:
        row = inventory and inventory.row
        record = {**dataclasses.asdict(found), "findings": findings(found), "inventory": row}
        print(json.dumps(record))
        return
    _show(console, found)
    for line in [] if inventory is None else inventory.lines:
        console.print(f"network: {line}", markup=False, soft_wrap=True)
    if recipe is not None and not recipe.parallel.is_whole:
        console.print(LEFT_OUT, markup=False, soft_wrap=True)
    if options.write:
        console.print(f"wrote {options.write}; plan with it: firecaffe plan … --cluster "
                      f"{options.write}", markup=False, soft_wrap=True)  # fmt: skip


def _look(
    world: World, recipe: CheckedRecipe | None, folder: Path, say: Callable[[str], None]
) -> MeasuredCluster:
    import torch

    from firecaffe.cluster.world import TIMEOUT_S
    from firecaffe.measure.found_cluster import MeasuredCluster
    from firecaffe.measure.ranks_and_links import links_of, look_over
    from firecaffe.runs.environment import cpu_name
    from firecaffe.transport.local_ranks import meet_local_ranks

    is_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if is_gpu else cpu_name()
    ranks = look_over(world, folder, name, say)
    places = [(rank.host, rank.group) for rank in ranks]
    links = links_of(world, places, say) if world.world_size > 1 else []
    timed: list[list[StepTimes]] = []
    if recipe is not None:
        timed = _steps(world, recipe, say)
    exchanges: dict[str, dict[int, float]] = {}
    slowdown, has_met = 0.0, False
    if world.world_size > 1:
        shares = recipe is None or recipe.exchange.shared_memory
        use_memory = shares and not is_gpu
        local = meet_local_ranks(world, TIMEOUT_S) if use_memory else None
        has_met = local is not None
        try:
            say("exchanges")
            exchanges = _exchanges(world, recipe, local)
            if recipe is not None:
                say("computing beside an exchange")
                slowdown = _slowdown(world, recipe, local, timed)
        finally:
            if local is not None:
                local.close()
    size = world.local_world_size
    return MeasuredCluster(ranks, links, size, timed, exchanges, slowdown, has_met)


def _steps(
    world: World, recipe: CheckedRecipe, say: Callable[[str], None]
) -> list[list[StepTimes]]:
    """The timed steps of three micro-batch sizes, by rank; all ranks get all."""
    from firecaffe.cluster.agree import gather_text
    from firecaffe.measure.step_times import StepTimes, time_steps

    size, count = recipe.train.micro_batch_size, _micro_batches(world, recipe)
    steps = []
    for samples in sorted({max(1, size // 2), size, 2 * size}):
        say(f"steps of {samples} samples")
        gather_text(world, "")  # all at once, as in training
        steps.append(time_steps(recipe, world.device, samples, STEP_S, count))
    own = [dataclasses.asdict(step) for step in steps]
    stated = [json.loads(text) for text in gather_text(world, json.dumps(own))]
    return [[StepTimes(**_tuples(fields)) for fields in of_rank] for of_rank in stated]


def _micro_batches(world: World, recipe: CheckedRecipe) -> int:
    """The micro-batches of a timed step: as many as a rank has in training, up to some."""
    from firecaffe.measure.step_times import MOST_MICRO_BATCHES

    sharers = layout_of(recipe.parallel, world.world_size).sharers
    return min(ceil(recipe.train.num_micro_batches / sharers), MOST_MICRO_BATCHES)


def _slowdown(
    world: World,
    recipe: CheckedRecipe,
    local: LocalRanks | None,
    timed: Sequence[Sequence[StepTimes]],
) -> float:
    """How much longer the median rank's step takes beside an exchange, as a share of it."""
    from firecaffe.cluster.agree import gather_text
    from firecaffe.measure.step_times import time_steps_beside_exchange

    size = recipe.train.micro_batch_size
    alone_s = [median(t.compute_s) for row in timed for t in row if t.micro_batch_size == size]
    gather_text(world, "")
    beside = time_steps_beside_exchange(
        recipe, world, local, size, STEP_S, _micro_batches(world, recipe)
    )
    beside_s = [float(text) for text in gather_text(world, repr(median(beside.compute_s)))]
    return max(0.0, median(beside_s) / median(alone_s) - 1)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }


def _exchanges(
    world: World, recipe: CheckedRecipe | None, local: LocalRanks | None
) -> dict[str, dict[int, float]]:
    """Median seconds by exchange and bytes, as a training of this recipe would have them."""
    from firecaffe.measure.exchange_times import time_exchanges

    bucket = 4_000_000 if recipe is None else recipe.exchange.bucket_bytes
    names = list(EXCHANGES)
    if recipe is not None and recipe.exchange.algorithm not in (*names, "auto"):
        names.insert(0, recipe.exchange.algorithm)
    sizes = sorted({max(4, bucket // 16 // 4 * 4), max(4, bucket // 4 * 4)})
    timings = time_exchanges(world, names, sizes, REPETITIONS, lambda _: None, local, {})
    seconds: dict[str, dict[int, float]] = {}
    for timing in timings:
        seconds.setdefault(timing.algorithm, {})[timing.size_bytes] = timing.time_s
    return seconds


def _show(console: Console, cluster: MeasuredCluster) -> None:
    from firecaffe.measure.found_cluster import findings

    table = Table(box=SIMPLE_HEAD)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for rank in cluster.ranks:
        table.add_row(
            str(rank.rank),
            rank.host,
            f"{rank.clock_s * 1e3:+.1f} ± {rank.clock_error_s * 1e3:.1f}",
            f"{rank.free_memory_bytes / 1e9:.1f}",
            f"{rank.free_disk_bytes / 1e9:.1f}",
            f"{_middle(rank.matrix_flops) / 1e9:,.4g}",
            f"{_middle(rank.copy_bytes_per_s) / 1e9:.3g}",
            f"{rank.file_write_bytes_per_s / 1e6:,.0f}",
            f"{rank.file_read_bytes_per_s / 1e6:,.0f}",
        )
    console.print(table)
    if cluster.links:
        links = Table(box=SIMPLE_HEAD)
        for header in ("link", "latency, µs", "MB/s"):
            links.add_column(header, justify="right", no_wrap=True)
        for link in cluster.links:
            where = " (one host)" if link.in_host else ""
            links.add_row(
                f"{link.first} - {link.second}{where}",
                f"{link.latency_s * 1e6:.1f}",
                f"{link.bandwidth_bytes_per_s / 1e6:,.4g}",
            )
        console.print(links)
    for name, times in cluster.exchanges.items():
        shown = ", ".join(f"{size / 1e6:.3g} MB {1e3 * s:.3g} ms" for size, s in times.items())
        console.print(f"exchange {name}: {shown}", markup=False)
    if cluster.slowdown:
        console.print(f"beside an exchange, computing takes {cluster.slowdown:.0%} longer")
    for line in findings(cluster) or ["nothing stands out"]:
        console.print(line, markup=False, soft_wrap=True)


HEADERS = (
    "rank",
    "host",
    "clock, ms",
    "free GB",
    "disk GB",
    "GFLOP/s",
    "copy GB/s",
    "write MB/s",
    "read MB/s",
)


def _middle(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 2]
