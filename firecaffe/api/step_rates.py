"""Steps on this device: `firecaffe.bench_step`, and the measured step of a plan.

It shows the rate, the time by type of layer, and memory, after Keuper and Pfreundt 2016.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any

import psutil
import torch
from rich.console import RenderableType

from firecaffe.api.answer import Answer, numbers_table, write_cluster
from firecaffe.api.argument_checks import (
    check_number,
    cluster_to_write,
    commas,
    refuse_beside,
    wrong,
)
from firecaffe.api.recipe_argument import network_of, recipe_for, recipe_of
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.world import World, join
from firecaffe.data.decode import cores
from firecaffe.errors import FirecaffeError, MemoryFullError, RecipeError
from firecaffe.measure.cluster_findings import calibrated
from firecaffe.measure.step_times import LayerTypes, StepTimes, by_layer_type, time_steps
from firecaffe.planner.calibrate import MIN_ERROR, jitter_of, relative_spread
from firecaffe.planner.cluster import Cluster
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.user_code import failed

SHORT_LAYER_NAMES = {
    "convolution": "conv",
    "fully connected": "full",
    "pooling": "pool",
    "dropout": "drop",
    "normalization": "norm",
    "activation": "act",
}
MAX_SECONDS = 3600
PLAN_SECONDS = 2.0
"""The least time for the step that a plan measures."""


@dataclass(frozen=True, repr=False)
class StepRates(Answer):
    """Times of one worker's steps at each micro-batch size."""

    network: str
    """The network's name."""
    steps: Sequence[StepTimes]
    """Times and memory at each micro-batch size."""
    layers: Sequence[LayerTypes]
    """Time and memory by type of layer, at the same sizes as `steps`."""
    lines: Sequence[str]
    """The file that was written."""

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dict of each micro-batch size."""
        return [
            {**dataclasses.asdict(row), "images_per_s": row.images_per_s, **kinds.as_dict()}
            for row, kinds in zip(self.steps, self.layers, strict=True)
        ]

    def _parts(self) -> Iterator[RenderableType]:
        names = list(dict.fromkeys(name for kinds in self.layers for name in kinds.time_s))
        headers = ["samples", "ms", "samples/s", "of best", "update, ms", "MB"]
        headers += [SHORT_LAYER_NAMES.get(name, name) for name in names]
        table = numbers_table(*headers, title=f"{self.network}, one worker")
        best = max(row.images_per_s for row in self.steps)
        for row, kinds in zip(self.steps, self.layers, strict=True):
            whole = sum(kinds.time_s.values())
            table.add_row(
                str(row.micro_batch_size),
                f"{1e3 * row.micro_batch_size / row.images_per_s:.2f}",
                f"{row.images_per_s:,.4g}",
                f"{row.images_per_s / best:.0%}",
                f"{1e3 * median_high(row.update_s):.2f}",
                f"{row.memory_bytes / 1e6:,.0f}",
                *(f"{kinds.time_s.get(name, 0.0) / whole:.0%}" for name in names),
            )
        yield table
        kept = self.layers[-1].memory_bytes.items()
        kept_by = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in kept if size)
        largest = self.steps[-1].micro_batch_size
        yield f"outputs kept by type of layer, micro-batch {largest}: {kept_by}"
        yield from self.lines


@from_script
def bench_step(
    recipe: Recipe | str | Path | None = None,
    *,
    sizes: str | int | Sequence[int] = (1, 2, 4, 8, 16, 32),
    seconds: float = 2.0,
    cluster: str | Path = "",
    write: str | Path = "",
    overwrite: bool = False,
    model: str = "",
    args: Mapping[str, Any] | None = None,
    input: str = "",
) -> StepRates:
    """Time the steps of one worker on this device, and their layers.

    Args:
        recipe: The training, or the path of its file. Without it: `model`.
        sizes: The micro-batch sizes to measure.
        seconds: The least time for each size.
        cluster: With `write`: the cluster, or its file, that the file starts from.
        write: A cluster file for `plan`, FILE.toml, with the device as measured.
        overwrite: Replace that file if it exists.
        model: A network without a recipe, by name.
        args: The arguments of `model`.
        input: The shape of its images, as 3x224x224; without it the network's own.

    Raises: RecipeError for a wrong argument; MemoryFullError if a micro-batch does not fit.
    """
    check_alone("bench step")
    if recipe is None:
        if not model:
            raise RecipeError(f"bench step: give a recipe or {option('model')}")
        checked = recipe_for(*network_of(model, args or {}, input))
    else:
        refuse_beside("a recipe", model=model, args=args, input=input)
        checked = recipe_of(recipe)
    numbers = _sizes(commas("sizes", sizes))
    _check_memory(checked, max(numbers))
    check_number("seconds", seconds)
    if not 0 <= seconds <= MAX_SECONDS:
        raise wrong("seconds", f"{seconds:g}", f"0 to {MAX_SECONDS}")
    extended = cluster_to_write(write, overwrite, cluster)
    with join(checked.train.device) as world:
        steps = [_time(checked, world, size, seconds) for size in numbers]
        layers = [by_layer_type(checked, world.device, size) for size in numbers]
    lines = []
    if extended is not None:
        measured = calibrated(extended, checked, steps)
        # Workers of a CPU share its cores.
        shared = measured.cores_per_node if world.device.type == "cuda" else cores()
        measured = dataclasses.replace(measured, cores_per_node=shared)
        lines.append(write_cluster(write, measured))
    return StepRates(checked.model.label, steps, layers, lines)


def _sizes(typed: str) -> list[int]:
    try:
        sizes = sorted({int(word) for word in typed.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise wrong("sizes", repr(typed), "numbers from 1, as 1,2,4")
    return sizes


def _check_memory(recipe: CheckedRecipe, largest: int) -> None:
    needed_bytes = largest * workload_of(recipe).activation_bytes
    has_bytes = psutil.virtual_memory().total
    if recipe.train.device != "cuda" and needed_bytes > has_bytes:
        raise RecipeError(
            f"{option('sizes')} has {largest}; the outputs of its layers would take "
            f"{needed_bytes / 1e9:,.4g} GB, and this host has {has_bytes / 1e9:.1f} GB"
        )


def _time(recipe: CheckedRecipe, world: World, size: int, seconds: float) -> StepTimes:
    try:
        return time_steps(recipe, world.device, size, seconds)
    except torch.OutOfMemoryError as error:
        smaller = f"take smaller {option('sizes')}"
        raise MemoryFullError(
            f"a micro-batch of {size} does not fit {world.device}; {smaller}"
        ) from error
    except FirecaffeError:
        raise
    except Exception as error:  # as BatchNorm's of a single sample
        has = f"{option('sizes')} has {size}"
        raise failed(f"{has}; a step of {recipe.model.label}", error) from error


def measured_here(
    recipe: CheckedRecipe | None, clusters: Sequence[Cluster]
) -> tuple[list[Cluster], list[str]]:
    """Give clusters this host's device and cores, by steps of a recipe; return a line on them, too.

    Missing data are replaced by noise of their shape. Raises: RecipeError without a recipe,
    LaunchError in one of several ranks, MemoryFullError if a micro-batch does not fit a GPU.
    """
    if recipe is None:
        raise RecipeError(
            f"{option('measure')} goes with a recipe; firecaffe bench step "
            "--model NAME --write FILE.toml measures a network alone"
        )
    check_alone(f"plan with {option('measure')}")
    size = recipe.train.micro_batch_size
    with join(recipe.train.device) as world:
        try:
            times = time_steps(recipe, world.device, size, PLAN_SECONDS)
        except torch.OutOfMemoryError as error:
            raise MemoryFullError(
                f"train.micro_batch_size is {size}, which does not fit {world.device}"
            ) from error
        is_gpu = world.device.type == "cuda"
        of_host = "" if is_gpu else f"; each node has the {cores()} cores of this host"
    step = times.measured(recipe)
    step = dataclasses.replace(step, error=max(MIN_ERROR, step.error))
    said = (
        f"measured here: {step.model}, a micro-batch of {size} takes {step.compute_s * 1e3:.3g} "
        f"ms, which may be off by {step.error:.0%}; the update {step.update_s * 1e3:.3g} ms"
        f"{of_host}; memory, prices and power are the cluster's"
    )
    jitter = jitter_of(relative_spread(times.compute_s), times.micro_batches)
    return [
        dataclasses.replace(
            cluster,
            device=dataclasses.replace(cluster.device, measured=(step,), jitter=jitter),
            cores_per_node=0 if is_gpu else cores(),
        )
        for cluster in clusters
    ], [said]
