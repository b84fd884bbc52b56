"""`firecaffe bench step`: time and memory of a step on this device, by micro-batch size.

It shows the rate, the time by type of layer, and memory, after Keuper and Pfreundt 2016.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from firecaffe.cli.cluster_file import cluster_to_write, write_cluster
from firecaffe.cli.console import make_console
from firecaffe.cli.launched import check_alone
from firecaffe.cli.network import network_of
from firecaffe.cli.options.bench_step import USAGE, make_parser
from firecaffe.cli.parse import parse_recipe
from firecaffe.cluster.world import World, join
from firecaffe.errors import MemoryFullError, RecipeError
from firecaffe.measure.device import calibrated
from firecaffe.measure.step_times import LayerTypes, StepTimes, by_layer_type, time_steps
from firecaffe.models import MODELS
from firecaffe.models.config import ModelConfig
from firecaffe.plan.of_recipe import workload_of
from firecaffe.plan.workload import input_of
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe
from firecaffe.recipe.sections import Recipe

SHORT_LAYER_NAMES = {
    "convolution": "conv",
    "fully connected": "full",
    "pooling": "pool",
    "dropout": "drop",
}
SHORT_LAYER_NAMES |= {"normalization": "norm", "activation": "act"}
MOST_SECONDS = 3600


def main(argv: list[str]) -> int:
    check_alone("bench step")
    if make_parser().read(argv).positionals:
        recipe, options = parse_recipe(make_parser(has_recipe=True), argv)
    else:
        options = make_parser().parse_args(argv)
        if not options.model:
            raise RecipeError(f"give a recipe or --model; usage: firecaffe bench step {USAGE}")
        recipe = recipe_for(*network_of(options))
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
        measured = dataclasses.replace(calibrated(cluster, recipe, rows), name=path.stem)
        write_cluster(path, measured)
    if options.json:
        print(
            json.dumps(
                [
                    {**dataclasses.asdict(row), "images_per_s": row.images_per_s, **each.as_dict()}
                    for row, each in zip(rows, types, strict=True)
                ]
            )
        )
        return 0
    _show(make_console(), recipe, rows, types)
    if options.write:
        print(f"wrote {options.write}")
    return 0


def recipe_for(config: ModelConfig, input_CHW: tuple[int, int, int] | None) -> CheckedRecipe:
    """Make a recipe for images that need not exist. Raises RecipeError if no data set fits."""
    shape = input_CHW or input_of(config)
    channels, side, columns = shape
    is_imagenet = config.name not in MODELS or MODELS[config.name].num_classes == 1000
    words: dict[str, Any] = {"name": "folder", "resize": side, "crop": side}
    if shape == (1, 28, 28):
        words = {"name": "generated"}
    elif shape == (3, 32, 32) and not is_imagenet:
        words = {"name": "cifar10"}
    elif channels != 3 or side != columns:
        by = "x".join(map(str, shape))
        raise RecipeError(f"--input is {by}; without a recipe it must be 1x28x28 or 3xSxS")
    recipe = Recipe(model=config)
    return check_recipe(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **words)))


def _sizes(words: str) -> list[int]:
    try:
        sizes = sorted({int(word) for word in words.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise RecipeError(f"--sizes is {words!r}; it must be numbers from 1, as 1,2,4")
    return sizes


def _check_memory(recipe: CheckedRecipe, sizes: Sequence[int]) -> None:
    needed_bytes = max(sizes) * workload_of(recipe).activation_bytes
    has_bytes = psutil.virtual_memory().total
    if recipe.train.device != "cuda" and needed_bytes > has_bytes:
        raise RecipeError(
            f"--sizes has {max(sizes)}; the outputs of its layers would take "
            f"{needed_bytes / 1e9:,.4g} GB, and this host has {has_bytes / 1e9:.1f} GB"
        )


def _time(recipe: CheckedRecipe, world: World, size: int, seconds: float) -> StepTimes:
    try:
        return time_steps(recipe, world.device, size, seconds)
    except torch.OutOfMemoryError as error:
        raise MemoryFullError(
            f"a micro-batch of {size} does not fit {world.device}; take smaller --sizes"
        ) from error


def _show(
    console: Console, recipe: CheckedRecipe, rows: Sequence[StepTimes], types: Sequence[LayerTypes]
) -> None:
    names = list(dict.fromkeys(name for each in types for name in each.time_s))
    table = Table(box=SIMPLE_HEAD, title=f"{recipe.model.label}, one worker")
    for header in ("samples", "ms", "samples/s", "of best", "update, ms", "MB"):
        table.add_column(header, justify="right", no_wrap=True)
    for name in names:
        table.add_column(SHORT_LAYER_NAMES.get(name, name), justify="right", no_wrap=True)
    best = max(row.images_per_s for row in rows)
    for row, each in zip(rows, types, strict=True):
        whole = sum(each.time_s.values())
        table.add_row(
            str(row.micro_batch_size),
            f"{1e3 * row.micro_batch_size / row.images_per_s:.2f}",
            f"{row.images_per_s:,.4g}",
            f"{row.images_per_s / best:.0%}",
            f"{1e3 * sorted(row.update_s)[len(row.update_s) // 2]:.2f}",
            f"{row.memory_bytes / 1e6:,.0f}",
            *(f"{each.time_s.get(name, 0.0) / whole:.0%}" for name in names),
        )
    console.print(table)
    largest = types[-1]
    held = ", ".join(
        f"{name} {size / 1e6:,.1f} MB" for name, size in largest.memory_bytes.items() if size
    )
    console.print(f"outputs kept by type of layer, micro-batch {rows[-1].micro_batch_size}: {held}")
