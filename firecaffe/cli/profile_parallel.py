"""`firecaffe profile MODEL --parallel`: a table of what workers send, by data and in parts."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from firecaffe.plan.layer_traffic import BY_DATA, LayerVolumes, Volumes

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
            _millions(layer.by_rows),
            "-" if layer.most_samples is None else f"{layer.most_samples:,}",
            layer.cheapest,
        )
    shown = [table, *([_paths(volumes)] if volumes.paths else [])]
    return Group(*shown, *(Text(line) for line in _told(volumes)))


def _paths(volumes: Volumes) -> Table:
    table = Table(title="modules of paths, whose layers are above, too", box=box.SIMPLE)
    table.add_column("module", no_wrap=True)
    table.add_column("kind")
    for header in ("paths", "weights", "in", "out", "data", "by paths"):
        table.add_column(header, justify="right")
    table.add_column("cheapest")
    for path in volumes.paths:
        table.add_row(
            path.name,
            path.kind,
            *(f"{number:,}" for number in (path.paths, path.weights, path.inputs, path.outputs)),
            _millions(path.by_data),
            _millions(path.by_paths),
            path.cheapest,
        )
    return table


def _by(layer: LayerVolumes, words: tuple[str, ...]) -> str:
    return _millions(next((layer.by_model[w] for w in words if w in layer.by_model), None))


def _millions(numbers: float | None) -> str:
    return "-" if numbers is None else f"{numbers / 1e6:,.3f}"


def _told(volumes: Volumes) -> list[str]:
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
        some = ", ".join(each.name or "the network's own" for each in whole[:4])
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
