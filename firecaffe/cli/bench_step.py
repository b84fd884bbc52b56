"""`firecaffe bench step`: time and memory of a step on this device, by micro-batch size.

It shows the rate, the time by type of layer, and memory, after Keuper and Pfreundt 2016.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from firecaffe.api.answer import make_console, numbers_table, write_cluster
from firecaffe.cli.arguments import Parser
from firecaffe.cli.shared_options import NAME, add_cluster_file, cluster_to_write, network_words
from firecaffe.errors import FirecaffeError, MemoryFullError, RecipeError

if TYPE_CHECKING:
    from firecaffe.cluster.world import World
    from firecaffe.measure.step_times import LayerTypes, StepTimes
    from firecaffe.recipe.checked_recipe import CheckedRecipe

USAGE = (
    "RECIPE.toml | --model NAME [--sizes 1,2,4,…] [--cluster NAME|FILE] "
    "[--write FILE.toml [--overwrite]]"
)
ABOUT = (
    "Time the steps of one worker at each micro-batch size: samples/s and their share of the best, "
    "the update, memory, and the time by type of layer."
)
DEFAULT_SIZES = "1,2,4,8,16,32"
INSTEAD = {"train.micro_batch_size": "--sizes says which are measured"}


def make_parser(has_recipe: bool = False) -> Parser:
    """Make the parser. With `has_recipe`, it lacks the options that replace a recipe."""
    parser = Parser(
        "bench step",
        USAGE,
        ABOUT,
        takes_recipe=True,
        instead=INSTEAD,
        notes=(
            "--write puts the measurements into a cluster file for `firecaffe plan`. From three "
            "sizes on, the device's efficiency and overhead are fitted to them.",
        ),
    )
    add = parser.add
    add("--sizes", default=DEFAULT_SIZES, metavar="N,N", help="micro-batch sizes to measure")
    add("--seconds", default=2.0, metavar="S", help="least time for each size")
    add_cluster_file(parser, "the cluster file to write")
    add("--json", action="store_true", help="print JSON")
    if not has_recipe:
        add = parser.add_group("instead of a recipe")
        add("--model", metavar="NAME", help=NAME)
        network_words(add)
    return parser


SHORT_LAYER_NAMES = {
    "convolution": "conv",
    "fully connected": "full",
    "pooling": "pool",
    "dropout": "drop",
}
SHORT_LAYER_NAMES |= {"normalization": "norm", "activation": "act"}
MOST_SECONDS = 3600


def main(argv: list[str]) -> int:
    from firecaffe.api.recipe_argument import network_of, recipe_for
    from firecaffe.cli.typed_recipe import parse_recipe
    from firecaffe.cluster.groups import check_alone
    from firecaffe.cluster.world import join
    from firecaffe.data.decode import cores
    from firecaffe.measure.found_cluster import calibrated
    from firecaffe.measure.step_times import by_layer_type

    check_alone("bench step")
    if make_parser().read(argv).positionals:
        recipe, options = parse_recipe(make_parser(has_recipe=True), argv)
    else:
        options = make_parser().parse_args(argv)
        if not options.model:
            raise RecipeError(f"give a recipe or --model; usage: firecaffe bench step {USAGE}")
        recipe = recipe_for(*network_of(options.model, options.args, options.input))
    sizes = _sizes(options.sizes)
    _check_memory(recipe, sizes)
    if not 0 <= options.seconds <= MOST_SECONDS:
        raise RecipeError(f"--seconds is {options.seconds:g}; it must be 0 to {MOST_SECONDS}")
    cluster = cluster_to_write(options)
    with join(recipe.train.device) as world:
        rows = [_time(recipe, world, size, options.seconds) for size in sizes]
        types = [by_layer_type(recipe, world.device, size) for size in sizes]
    if cluster is not None:
        path = Path(options.write)
        measured = calibrated(cluster, recipe, rows)
        # Workers of a CPU share its cores.
        shared = measured.cores_per_node if world.device.type == "cuda" else cores()
        write_cluster(path, dataclasses.replace(measured, name=path.stem, cores_per_node=shared))
    if options.json:
        print(
            json.dumps(
                [
                    {
                        **dataclasses.asdict(row),
                        "images_per_s": row.images_per_s,
                        **kinds.as_dict(),
                    }
                    for row, kinds in zip(rows, types, strict=True)
                ]
            )
        )
        return 0
    _show(make_console(), recipe, rows, types)
    if options.write:
        print(f"wrote {options.write}")
    return 0


def _sizes(typed: str) -> list[int]:
    try:
        sizes = sorted({int(word) for word in typed.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise RecipeError(f"--sizes is {typed!r}; it must be numbers from 1, as 1,2,4")
    return sizes


def _check_memory(recipe: CheckedRecipe, sizes: Sequence[int]) -> None:
    import psutil

    from firecaffe.planner.of_recipe import workload_of

    needed_bytes = max(sizes) * workload_of(recipe).activation_bytes
    has_bytes = psutil.virtual_memory().total
    if recipe.train.device != "cuda" and needed_bytes > has_bytes:
        raise RecipeError(
            f"--sizes has {max(sizes)}; the outputs of its layers would take "
            f"{needed_bytes / 1e9:,.4g} GB, and this host has {has_bytes / 1e9:.1f} GB"
        )


def _time(recipe: CheckedRecipe, world: World, size: int, seconds: float) -> StepTimes:
    import torch

    from firecaffe.measure.step_times import time_steps
    from firecaffe.user_code import failed

    try:
        return time_steps(recipe, world.device, size, seconds)
    except torch.OutOfMemoryError as error:
        raise MemoryFullError(
            f"a micro-batch of {size} does not fit {world.device}; take smaller --sizes"
        ) from error
    except FirecaffeError:
        raise
    except Exception as error:  # as BatchNorm's of a single sample
        raise failed(f"--sizes has {size}; a step of {recipe.model.label}", error) from error


def _show(
    console: Console, recipe: CheckedRecipe, rows: Sequence[StepTimes], types: Sequence[LayerTypes]
) -> None:
    names = list(dict.fromkeys(name for kinds in types for name in kinds.time_s))
    headers = ["samples", "ms", "samples/s", "of best", "update, ms", "MB"]
    headers += [SHORT_LAYER_NAMES.get(name, name) for name in names]
    table = numbers_table(*headers, title=f"{recipe.model.label}, one worker")
    best = max(row.images_per_s for row in rows)
    for row, kinds in zip(rows, types, strict=True):
        whole = sum(kinds.time_s.values())
        table.add_row(
            str(row.micro_batch_size),
            f"{1e3 * row.micro_batch_size / row.images_per_s:.2f}",
            f"{row.images_per_s:,.4g}",
            f"{row.images_per_s / best:.0%}",
            f"{1e3 * sorted(row.update_s)[len(row.update_s) // 2]:.2f}",
            f"{row.memory_bytes / 1e6:,.0f}",
            *(f"{kinds.time_s.get(name, 0.0) / whole:.0%}" for name in names),
        )
    console.print(table)
    largest = types[-1]
    held = ", ".join(
        f"{name} {size / 1e6:,.1f} MB" for name, size in largest.memory_bytes.items() if size
    )
    console.print(f"outputs kept by type of layer, micro-batch {rows[-1].micro_batch_size}: {held}")
