"""`firecaffe profile MODEL`: parameters, activations, FLOPs and traffic, layer by layer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich import box
from rich.console import RenderableType
from rich.table import Table

from firecaffe.cli.console import make_console
from firecaffe.cli.network import network_of
from firecaffe.cli.options.profile import make_parser
from firecaffe.cli.profile_parallel import render_parallel
from firecaffe.compression.transfer import LINKS, transfer_of
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.layer_costs import Profile
from firecaffe.models.network import with_outline
from firecaffe.models.weights import FCZ
from firecaffe.plan.layer_traffic import volumes_of
from firecaffe.plan.workload import images_of, input_of, profile_of
from firecaffe.training.coded import check_outline, described, with_nets

Shape = tuple[int, int, int]
"""Channels, rows and columns."""

WORKERS = 8

MOST_WORKERS = 1_000_000

MOST_IMAGES = 1_000_000_000
"""Most images of a batch. A tensor of more than 2^63 bytes is impossible."""


def main(argv: list[str]) -> int:
    options = make_parser().parse_args(argv)
    if not 1 <= options.batch_size <= MOST_IMAGES:
        raise RecipeError(f"--batch-size is {options.batch_size}; it must be 1 to {MOST_IMAGES:,}")
    workers = _workers(options)
    path = Path(options.model)
    transfer, num_classes = None, None
    config, shape = network_of(options)
    if path.suffix == FCZ:
        transfer = transfer_of(path)
        config, shape, num_classes = _in_file(path, shape, options.trust_code)
    input_CHW = shape or input_of(config)
    if options.parallel:
        volumes = volumes_of(config, images_of(input_CHW), options.batch_size, workers)
        _tell(options, volumes.as_dict(), lambda: render_parallel(volumes))
        return 0
    result = with_outline(
        config,
        num_classes,
        None if shape is None else shape[0],
        lambda network: profile_of(config, network, images_of(input_CHW), options.batch_size),
    )
    found = result.as_dict()
    if transfer is not None:
        found["transfer"] = transfer.as_dict(LINKS)
    _tell(options, found, lambda: render(result))
    if transfer is not None and not options.json:
        print(*transfer.words(LINKS), sep="\n")
    return 0


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
        raise RecipeError(f"{path}: does not say what it takes; give --input, as --input 3x32x32")
    channels, rows, columns = about.input_shape
    return recipe.model, (channels, rows, columns), about.num_classes


def _tell(
    options: Namespace, found: dict[str, Any], rendered: Callable[[], RenderableType]
) -> None:
    if options.json:
        print(json.dumps(found))
    else:
        make_console().print(rendered())


def _workers(options: Namespace) -> int:
    workers: int | None = options.workers
    if workers is None:
        return WORKERS
    if not options.parallel:
        raise RecipeError("--workers says over how many --parallel counts; give both, or neither")
    if not 1 <= workers <= MOST_WORKERS:
        raise RecipeError(f"--workers is {workers}; it must be 1 to {MOST_WORKERS:,}")
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
