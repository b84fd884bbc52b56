"""`firecaffe.check`: is this cluster what it should be, and what a plan needs to know of it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count, check_device, path_of, refuse_beside
from firecaffe.api.check_ranks import Look, look
from firecaffe.api.cluster_file import check_cluster_file, write_cluster
from firecaffe.api.network_argument import network_of, recipe_for
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.hosts import Hosts, parse_nodes
from firecaffe.cluster.world import is_launched
from firecaffe.errors import RecipeError
from firecaffe.measure.found_cluster import MeasuredCluster, cluster_of, findings
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import check_hosts
from firecaffe.resume_advice import option
from firecaffe.script.launch import launch_on

LEFT_OUT = (
    "timed was the whole network on each rank, and the exchange of its gradients: of [parallel], "
    "exchanges of activations and the order of stages are left out; `firecaffe plan … --ways all` "
    "makes them of these figures"
)
"""What is said of a recipe whose workers hold one model together."""


@dataclass(frozen=True, repr=False)
class Checked(Answer):
    """What was measured of a cluster, and what stands out."""

    measured: MeasuredCluster
    """The ranks, their links, and with a recipe its steps and exchanges."""
    inventory: Mapping[str, Any] | None
    """What the recipe's network keeps, changes and draws; None without a recipe."""
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
        yield from _parts(self.measured)
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
    """Look a cluster over before a training: clocks, memory, disks, links, every rank's rate.

    In a launcher's world each rank calls it. Ranks other than the first, and hosts without it, have
    None.

    Args:
        recipe: A training whose steps and exchange are measured, too, or the path of its file.
        nproc_per_node: The number of ranks to start on this host.
        write: The cluster file to write, FILE.toml.
        overwrite: Replace that file if it exists.
        folder: Where files are written and read.
        master_port: The port at which ranks of one host meet; 0 takes any.
        nnodes: The number of hosts; each calls it with the same arguments.
        rdzv_endpoint: HOST:PORT, where hosts meet.
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
        raise RecipeError(f"{option('folder')} is {folder}; it must be a folder that is there")
    asked = checked, device, str(folder)
    nodes = str(nnodes)
    if is_launched(nodes):
        return _answer(look(*asked), checked, write)
    check_count("nproc_per_node", nproc_per_node, 1)
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
        path = Path(write)
        write_cluster(path, cluster_of(result.measured, recipe, path.stem))
        lines.append(f"wrote {write}; plan with it: firecaffe plan … --cluster {write}")
    return Checked(result.measured, result.inventory, lines)


def _parts(measured: MeasuredCluster) -> Iterator[RenderableType]:
    table = Table(box=SIMPLE_HEAD)
    for header in HEADERS:
        table.add_column(header, justify="right", no_wrap=True)
    for rank in measured.ranks:
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
    yield table
    if measured.links:
        links = Table(box=SIMPLE_HEAD)
        for header in ("link", "latency, µs", "MB/s"):
            links.add_column(header, justify="right", no_wrap=True)
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
