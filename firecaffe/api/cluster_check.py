"""`firecaffe.check`: checks a cluster, and measures what a plan needs to know about it."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median, median_high
from typing import Any

import torch
from rich.console import RenderableType

from firecaffe.api.answer import Answer, numbers_table, progress, write_cluster
from firecaffe.api.argument_checks import (
    check_cluster_file,
    check_count,
    check_device,
    path_of,
    refuse_beside,
    wrong,
)
from firecaffe.api.recipe_argument import network_of, recipe_for, recipe_of
from firecaffe.cluster.agree import agree, gather_as, gather_text
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.hosts import Hosts, parse_nodes
from firecaffe.cluster.process_settings import compute_threads
from firecaffe.cluster.world import TIMEOUT_S, World, is_launched, join
from firecaffe.measure.cluster_findings import MeasuredCluster, cluster_of, findings
from firecaffe.measure.exchange_times import make_encoders, time_exchanges
from firecaffe.measure.ranks_and_links import inventory_of, links_of, look_over
from firecaffe.measure.step_times import (
    MAX_MICRO_BATCHES,
    StepTimes,
    time_steps,
    time_steps_beside_exchange,
)
from firecaffe.planner.price import MEASURED
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import check_hosts, layout_of
from firecaffe.runs.environment import cpu_name
from firecaffe.script.launch import launch_on
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks

EXCHANGES = ("tree", "ring", "halving_doubling", "sharded_parameter_server", "native")
"""The sharded server stands for all exchanges that send directly to owners: shards, row codecs."""

SMALL_BYTES = 4096
STEP_S = 1.5
REPETITIONS = 5


@dataclass(frozen=True)
class Look:
    """The ranks' measurements, the same on all of them."""

    measured: MeasuredCluster
    inventory: dict[str, Any] | None
    """The network's state, changes and draws; None without a recipe, and on other ranks."""
    inventory_lines: Sequence[str]
    is_first: bool


def look(recipe: CheckedRecipe | None, device: str, folder: str) -> Look:
    """Measure this rank, its links and its steps; all ranks call it."""
    threads, on = (1, device) if recipe is None else (recipe.train.threads, recipe.train.device)
    with compute_threads(threads), join(on) as world:
        agree(world, {"check options": json.dumps([device, folder])})
        say = progress("checking", world.is_first)
        measured = _look(world, recipe, Path(folder), say)
        if recipe is None or not world.is_first:
            return Look(measured, None, (), world.is_first)
        say("the network")
        inventory = inventory_of(recipe, world.device)
        return Look(measured, dict(inventory.row), tuple(inventory.lines), is_first=True)


def _look(
    world: World, recipe: CheckedRecipe | None, folder: Path, say: Callable[[str], None]
) -> MeasuredCluster:
    is_gpu = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if is_gpu else cpu_name()
    ranks = look_over(world, folder, name, say)
    places = [(rank.host, rank.group) for rank in ranks]
    links = links_of(world, places, say) if world.world_size > 1 else []
    timed: list[list[StepTimes]] = []
    if recipe is not None:
        timed = _steps(world, recipe, say)
    exchanges: dict[str, dict[int, float]] = {}
    slowdown, has_local_ranks = 0.0, False
    if world.world_size > 1:
        shares = recipe is None or recipe.exchange.shared_memory
        use_memory = shares and not is_gpu
        local = meet_local_ranks(world, TIMEOUT_S) if use_memory else None
        has_local_ranks = local is not None
        with nullcontext() if local is None else closing(local):
            say("exchanges")
            exchanges = _exchanges(world, recipe, local)
            if recipe is not None:
                say("computing beside an exchange")
                slowdown = _slowdown(world, recipe, local, timed)
    size = world.local_world_size
    return MeasuredCluster(ranks, links, size, timed, exchanges, slowdown, has_local_ranks)


def _steps(
    world: World, recipe: CheckedRecipe, say: Callable[[str], None]
) -> list[list[StepTimes]]:
    """The timed steps of three micro-batch sizes, by rank; all ranks get all."""
    size = recipe.train.micro_batch_size
    steps = []
    for count in sorted({max(1, size // 2), size, 2 * size}):
        say(f"steps of {count} samples")
        gather_text(world, "")  # all at once, as in training
        steps.append(time_steps(recipe, world.device, count, STEP_S, _micro_batches(world, recipe)))
    return gather_as(world, steps, list[StepTimes])


def _micro_batches(world: World, recipe: CheckedRecipe) -> int:
    sharers = layout_of(recipe.parallel, world.world_size).sharers
    return min(ceil(recipe.train.num_micro_batches / sharers), MAX_MICRO_BATCHES)


def _slowdown(
    world: World,
    recipe: CheckedRecipe,
    local: LocalRanks | None,
    timed: Sequence[Sequence[StepTimes]],
) -> float:
    """The slow-down of the median rank's step beside an exchange, as a share of the step."""
    size = recipe.train.micro_batch_size
    alone_s = [median(t.compute_s) for row in timed for t in row if t.micro_batch_size == size]
    gather_text(world, "")
    beside = time_steps_beside_exchange(
        recipe, world, local, size, STEP_S, _micro_batches(world, recipe)
    )
    beside_s = gather_as(world, median(beside.compute_s), float)
    return max(0.0, median(beside_s) / median(alone_s) - 1)


def _exchanges(
    world: World, recipe: CheckedRecipe | None, local: LocalRanks | None
) -> dict[str, dict[int, float]]:
    """Median seconds by exchange and bytes, as a training of this recipe would have them."""
    bucket = 4_000_000 if recipe is None else recipe.exchange.bucket_bytes
    names = list(EXCHANGES)
    if recipe is not None and recipe.exchange.algorithm not in (*names, "auto"):
        names.insert(0, recipe.exchange.algorithm)
    sizes = sorted({SMALL_BYTES, max(SMALL_BYTES, bucket // 4 * 4)})
    codec = "" if recipe is None else recipe.exchange.compressor
    encoders = make_encoders([codec] if codec in MEASURED else [])
    timings = time_exchanges(world, names, sizes, REPETITIONS, lambda _: None, local, encoders)
    seconds: dict[str, dict[int, float]] = {}
    for timing in timings:
        seconds.setdefault(timing.algorithm, {})[timing.size_bytes] = timing.time_s
    return seconds


LEFT_OUT = (
    "timed was the whole network on each rank, and the exchange of its gradients: of [parallel], "
    "exchanges of activations and the order of stages are left out; `firecaffe plan … --ways all` "
    "makes them of these figures"
)
"""A line on a recipe whose workers hold one model together."""


@dataclass(frozen=True, repr=False)
class Checked(Answer):
    """Measurements of a cluster, and what stands out."""

    measured: MeasuredCluster
    """The ranks, their links, and with a recipe its steps and exchanges."""
    inventory: Mapping[str, Any] | None
    """The network's state, changes and draws; None without a recipe."""
    lines: Sequence[str]
    """Lines about the network, and what was left out or written."""

    @property
    def findings(self) -> list[str]:
        """A line on each rank or link that stands out."""
        return list(findings(self.measured))

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured, with the findings and the inventory."""
        record = dataclasses.asdict(self.measured)
        return {**record, "findings": self.findings, "inventory": self.inventory}

    def _parts(self) -> Iterator[RenderableType]:
        yield from _shown(self.measured)
        yield from self.findings or ["nothing stands out"]
        yield from self.lines


@from_script
def check(
    recipe: Recipe | str | Path | None = None,
    *,
    nproc_per_node: int = 1,
    write: str | Path = "",
    overwrite: bool = False,
    folder: str | Path = ".",
    master_port: int = 0,
    nnodes: int | str = 1,
    rdzv_endpoint: str = "",
    rdzv_id: str = "",
    secret_file: str | Path = "",
    model: str = "",
    args: Mapping[str, Any] | None = None,
    input: str = "",
    device: str = "auto",
) -> Checked | None:
    """Check a cluster before a training: clocks, memory, disks, links, every rank's rate.

    In a launcher's world each rank calls it. Ranks other than the first, and hosts without it, get
    None.

    Args:
        recipe: A training whose steps and exchange are measured, too, or the path of its file.
        nproc_per_node: The number of ranks to start on this host.
        write: The cluster file to write, FILE.toml.
        overwrite: Replace that file if it exists.
        folder: Where files are written and read.
        master_port: The port at which ranks of one host meet; 0 takes any.
        nnodes: The number of hosts; each calls it with the same arguments.
        rdzv_endpoint: HOST:PORT at which hosts meet.
        rdzv_id: The check's name, the same on all hosts.
        secret_file: A file of mode 0600 with the check's secret, the same on all hosts.
        model: A network without a recipe, by name.
        args: The arguments of `model`.
        input: The shape of its images, as 3x224x224; without it the network's own.
        device: Without a recipe: auto, cpu or cuda.

    Raises: RecipeError for a wrong argument; LaunchError if ranks or hosts do not meet.
    """
    check_device(device)
    if not model:
        refuse_beside("no model, which they describe", args=args, input=input)
    checked: CheckedRecipe | None = None
    if recipe is not None:
        given = {"model": model, "device": "" if device == "auto" else device}
        refuse_beside("a recipe", **given)
        checked = recipe_of(recipe)
    elif model:
        checked = recipe_for(*network_of(model, args or {}, input), device)
    check_cluster_file(write, overwrite)
    if not path_of("folder", folder).is_dir():
        raise wrong("folder", folder, "a folder that is there")
    asked = checked, device, str(folder)
    nodes = str(nnodes)
    if is_launched(nodes):
        return _answer(look(*asked), checked, write)
    check_count("nproc_per_node", nproc_per_node, 1)
    check_count("master_port", master_port, 0)
    least, most = parse_nodes(nodes)
    if checked is not None:
        on_gpus = checked.train.device != "cpu" and torch.cuda.is_available()
        check_hosts(checked, nproc_per_node, least, most, on_gpus)
    secret = str(secret_file)
    hosts = Hosts(nproc_per_node, least, most, rdzv_endpoint, rdzv_id, master_port, secret)
    return _answer(launch_on(hosts, look, asked), checked, write)


def _answer(result: Look | None, recipe: CheckedRecipe | None, write: str | Path) -> Checked | None:
    if result is None or not result.is_first:
        return None
    lines = [f"network: {line}" for line in result.inventory_lines]
    if recipe is not None and not recipe.parallel.is_whole:
        lines.append(LEFT_OUT)
    if write:
        said = write_cluster(write, cluster_of(result.measured, recipe, Path(write).stem))
        lines.append(f"{said}; plan with it: firecaffe plan … --cluster {write}")
    return Checked(result.measured, result.inventory, lines)


def _shown(measured: MeasuredCluster) -> Iterator[RenderableType]:
    table = numbers_table(
        *("rank", "host", "clock, ms", "free GB", "disk GB"),
        *("GFLOP/s", "copy GB/s", "write MB/s", "read MB/s"),
    )
    for rank in measured.ranks:
        table.add_row(
            str(rank.rank),
            rank.host,
            f"{rank.clock_s * 1e3:+.1f} ± {rank.clock_error_s * 1e3:.1f}",
            f"{rank.free_memory_bytes / 1e9:.1f}",
            f"{rank.free_disk_bytes / 1e9:.1f}",
            f"{median_high(rank.matrix_flops) / 1e9:,.4g}",
            f"{median_high(rank.copy_bytes_per_s) / 1e9:.3g}",
            f"{rank.file_write_bytes_per_s / 1e6:,.0f}",
            f"{rank.file_read_bytes_per_s / 1e6:,.0f}",
        )
    yield table
    if measured.links:
        links = numbers_table("link", "latency, µs", "MB/s")
        for link in measured.links:
            where = " (one host)" if link.in_host else ""
            links.add_row(
                f"{link.first} - {link.second}{where}",
                f"{link.latency_s * 1e6:.1f}",
                f"{link.bandwidth_bytes_per_s / 1e6:,.4g}",
            )
        yield links
    for name, times in measured.exchanges.items():
        shown = ", ".join(f"{size / 1e6:.3g} MB {1e3 * s:.3g} ms" for size, s in times.items())
        yield f"exchange {name}: {shown}"
    if measured.slowdown:
        yield f"beside an exchange, computing takes {measured.slowdown:.0%} longer"
