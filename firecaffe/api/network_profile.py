"""`firecaffe.profile`: parameters, activations, FLOPs and traffic of a network, by layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count
from firecaffe.api.recipe_argument import network_of
from firecaffe.cluster.from_script import from_script
from firecaffe.compression.transfer import LINKS, FileTransfer, transfer_of
from firecaffe.data.dataset import Layout
from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.models.layer_costs import Profile
from firecaffe.models.network import with_outline
from firecaffe.models.weights import FCZ
from firecaffe.planner.layer_traffic import BY_DATA, LayerVolumes, Volumes, volumes_of
from firecaffe.planner.workload import PROFILED_IMAGES, images_of, input_of, profile_of
from firecaffe.resume_advice import option
from firecaffe.training.fcz_description import check_outline, described, with_nets

Shape = tuple[int, int, int]
"""Channels, rows and columns."""

WORKERS = 8

MAX_WORKERS = 1_000_000

MAX_IMAGES = 1_000_000_000
"""Most images of a batch. A tensor of more than 2^63 bytes is impossible."""


@dataclass(frozen=True, repr=False)
class NetworkProfile(Answer):
    """The costs of a network's layers; for a .fcz file also its transfer."""

    layers: Profile
    """The costs of the layers, and of the whole network."""
    transfer: FileTransfer | None = None
    """The file's bytes next to those of float32; None if the network comes from no file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the network's figures, and those of each layer."""
        record = self.layers.as_dict()
        return (
            record if self.transfer is None else record | {"transfer": self.transfer.as_dict(LINKS)}
        )

    def _parts(self) -> Iterator[RenderableType]:
        yield render(self.layers)
        if self.transfer is not None:
            yield from self.transfer.words(LINKS)


@dataclass(frozen=True, repr=False)
class TrafficProfile(Answer):
    """The numbers that each worker sends in a step, by data and with layers split."""

    volumes: Volumes
    """The numbers of each layer, and of the whole network."""

    def to_dict(self) -> dict[str, Any]:
        """Return the volumes of the network, and of each layer."""
        return self.volumes.as_dict()

    def _parts(self) -> Iterator[RenderableType]:
        yield render_parallel(self.volumes)


@from_script
def profile(
    model: str | Path,
    *,
    args: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    input: str = "",
    parallel: bool = False,
    workers: int | None = None,
    trust_code: bool = False,
) -> NetworkProfile | TrafficProfile:
    """Return the costs of a network's layers. It takes no memory.

    Args:
        model: A network by name, your own function as "package.module:function", or a .fcz file.
        args: Arguments of your own function.
        batch_size: Samples of the batch.
        input: The shape of a sample, as "3x224x224"; the network's own without it.
        parallel: Return what each worker sends, by data and with layers split.
        workers: With `parallel`: the number of workers; 8 without it.
        trust_code: Run code that the file names.

    Raises: RecipeError; CheckpointError for a damaged file.
    """
    check_count("batch_size", batch_size, 1, MAX_IMAGES)
    count = _workers(workers, parallel)
    config, shape = network_of(str(model) if isinstance(model, Path) else model, args or {}, input)
    path, transfer, num_classes = Path(model), None, None
    if path.suffix == FCZ:
        transfer = transfer_of(path)
        config, shape, num_classes = _in_file(path, shape, trust_code)
    input_CHW = shape or input_of(config)
    if parallel:
        return TrafficProfile(volumes_of(config, images_of(input_CHW), batch_size, count))
    layers = with_outline(
        config,
        num_classes,
        None if shape is None else shape[0],
        lambda network: _layers(config, network, images_of(input_CHW), batch_size),
    )
    return NetworkProfile(layers, transfer)


def _layers(config: ModelConfig, network: nn.Module, images: Layout, batch_size: int) -> Profile:
    try:
        return profile_of(config, network, images, batch_size)
    except RecipeError as error:
        if batch_size > 1 or not _takes_several(config, network, images):
            raise
        why = " ".join(str(error.__cause__).split())
        raise RecipeError(
            f"{option('batch_size')} is 1, which {config.label} does not take ({why}); give "
            f"{PROFILED_IMAGES} or more"
        ) from error


def _takes_several(config: ModelConfig, network: nn.Module, images: Layout) -> bool:
    try:
        profile_of(config, network, images, PROFILED_IMAGES)
    except RecipeError:
        return False
    return True


def _in_file(
    path: Path, typed: Shape | None, trust_code: bool
) -> tuple[ModelConfig, Shape, int | None]:
    """Return a .fcz file's network, image shape (`typed`, if given) and number of classes."""
    recipe, about = described(path, (), trust_code=trust_code)
    recipe = with_nets(path, recipe, ())
    check_outline(path, recipe.model, about)
    if typed:
        return recipe.model, typed, about.num_classes
    if len(about.input_shape) != 3:
        raise RecipeError(f"{path}: does not say what it takes; give {option('input')}, as 3x32x32")
    channels, rows, columns = about.input_shape
    return recipe.model, (channels, rows, columns), about.num_classes


def _workers(workers: int | None, parallel: bool) -> int:
    if workers is None:
        return WORKERS
    if not parallel:
        raise RecipeError(
            f"{option('workers')} says over how many {option('parallel')} counts; give both, or "
            "neither"
        )
    check_count("workers", workers, 1, MAX_WORKERS)
    return workers


def render(profile: Profile) -> Table:
    """Return a table with a line per layer and the totals in its last line.

    MB are 10^6 bytes, M MACs 10^6 multiply-adds. Activations, MACs and FLOPs, forward and backward,
    are of the whole batch. The caption gives |W|, D and their ratio, which decide between
    exchanging gradients and activations.
    """
    size = "x".join(str(n) for n in profile.input_CHW)
    ratio = profile.data_bytes / profile.weight_bytes if profile.weight_bytes else 0.0
    table = Table(
        title=f"batch {profile.batch_size} of {size}",
        caption=f"|W| {_millions(profile.weight_bytes)} MB, D {_millions(profile.data_bytes)} MB, "
        f"D / |W| {ratio:.1f}, {profile.forward_backward_flops / 1e9:,.1f} GFLOP per step",
        show_footer=True,
        box=box.SIMPLE,
    )
    table.add_column("layer", "total")
    table.add_column("kind")
    table.add_column("output")
    totals = {
        "parameters": f"{profile.parameters:,}",
        "weights, MB": _millions(profile.weight_bytes),
        "in, MB": "",
        "out, MB": "",
        "M MACs": _millions(profile.macs),
        "GFLOP": f"{profile.forward_backward_flops / 1e9:,.2f}",
    }
    for header, total in totals.items():
        table.add_column(header, total, justify="right")
    for layer in profile.layers:
        table.add_row(
            layer.name,
            layer.kind,
            "x".join(str(n) for n in layer.output_shape),
            f"{layer.parameters:,}" if layer.parameters else "",
            _millions(layer.weight_bytes) if layer.parameters else "",
            _millions(layer.input_activation_bytes),
            _millions(layer.output_activation_bytes),
            _millions(layer.macs) if layer.macs else "",
            f"{layer.forward_backward_flops / 1e9:,.2f}" if layer.macs else "",
        )
    return table


def _millions(n: int) -> str:
    return f"{n / 1e6:,.2f}"


BY_OUTPUTS, BY_INPUTS = ("neurons", "filters"), ("inputs", "channels")

WAYS = ("neurons, filters", "inputs, channels", "rows")


def render_parallel(volumes: Volumes) -> Group:
    """Return a line per layer with weights, in numbers, and the network's totals in bytes."""
    table = Table(
        title=f"batch {volumes.batch_size} over {volumes.workers} workers: "
        "millions of numbers that each sends in a step",
        box=box.SIMPLE,
    )
    table.add_column("layer", no_wrap=True)
    table.add_column("kind")
    for header in ("weights", "MB", "in", "out", "data", *WAYS):
        table.add_column(header, justify="right")
    table.add_column("fewer up to batch", justify="right")
    table.add_column("cheapest")
    for layer in volumes.layers:
        table.add_row(
            layer.name,
            layer.kind,
            f"{layer.weights:,}",
            f"{layer.weight_bytes / 1e6:,.2f}",
            f"{layer.inputs:,}",
            f"{layer.outputs:,}",
            f"{layer.by_data / 1e6:,.3f}",
            _by(layer, BY_OUTPUTS),
            _by(layer, BY_INPUTS),
            _in_millions(layer.by_rows),
            "-" if layer.most_samples is None else f"{layer.most_samples:,}",
            layer.cheapest,
        )
    shown = [table, *([_paths(volumes)] if volumes.paths else [])]
    return Group(*shown, *(Text(line) for line in _totals(volumes)))


def _paths(volumes: Volumes) -> Table:
    table = Table(title="modules of paths, whose layers are above, too", box=box.SIMPLE)
    table.add_column("module", no_wrap=True)
    table.add_column("kind")
    for header in ("paths", "weights", "in", "out", "data", "by paths"):
        table.add_column(header, justify="right")
    table.add_column("cheapest")
    for paths in volumes.paths:
        table.add_row(
            paths.name,
            paths.kind,
            *(
                f"{number:,}"
                for number in (paths.paths, paths.weights, paths.inputs, paths.outputs)
            ),
            _in_millions(paths.by_data),
            _in_millions(paths.by_paths),
            paths.cheapest,
        )
    return table


def _by(layer: LayerVolumes, words: tuple[str, ...]) -> str:
    return _in_millions(next((layer.by_model[w] for w in words if w in layer.by_model), None))


def _in_millions(numbers: float | None) -> str:
    return "-" if numbers is None else f"{numbers / 1e6:,.3f}"


def _totals(volumes: Volumes) -> list[str]:
    layers = volumes.layers
    split = [layer for layer in layers if layer.cheapest != BY_DATA]
    whole = [layer for layer in layers if not layer.by_model]
    said = [
        f"all layers by data: {volumes.bytes_by_data / 1e6:,.1f} MB",
        f"all by their better split: {volumes.bytes_by_model / 1e6:,.1f} MB",
        f"each layer the cheapest way: {volumes.bytes_by_layer / 1e6:,.1f} MB, "
        f"{len(split)} of {len(layers)} split",
    ]
    if whole:
        some = ", ".join(layer.name or "the network's own" for layer in whole[:4])
        said[1] += (
            f"; by data {len(whole)} that cannot be split over {volumes.workers} workers: "
            f"{some}{', …' if len(whole) > 4 else ''}"
        )
    return [
        *said,
        "in, out: numbers a sample. Each layer is counted by itself, its input and output whole: "
        "what is exchanged between layers that are cut differently is left out, and what "
        "neurons, then inputs, save. By rows weights are not shared out, and their gradients are "
        "summed as by data: activations are what a worker holds less of.",
    ]
