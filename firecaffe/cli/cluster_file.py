"""Cluster files from what was measured: what `firecaffe plan` reads again."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

from firecaffe.errors import RecipeError
from firecaffe.measured_step import Timed
from firecaffe.plan.calibrate import fit
from firecaffe.plan.cluster import Cluster, Device
from firecaffe.plan.compute import micro_batch
from firecaffe.planning import workload_of
from firecaffe.recipe import Recipe

SIZES_TO_FIT = 3


def calibrated(cluster: Cluster, recipe: Recipe, rows: Sequence[Timed]) -> Cluster:
    """The cluster with these steps measured, and its device's efficiency and overhead fitted to
    them where there are enough sizes.
    """
    own = recipe.model.name, recipe.train.autocast
    kept = tuple(row for row in cluster.device.measured if (row.model, row.autocast) != own)
    device = dataclasses.replace(cluster.device, measured=())
    if len(rows) >= SIZES_TO_FIT:
        device = _fitted(device, recipe, rows)
    device = dataclasses.replace(device, measured=(*kept, *(row.measured(recipe) for row in rows)))
    source = f"measured: steps of {recipe.model.name}"
    sources = tuple(dict.fromkeys([*cluster.sources, source]))
    return dataclasses.replace(cluster, device=device, sources=sources)


def _fitted(device: Device, recipe: Recipe, rows: Sequence[Timed]) -> Device:
    workload = workload_of(recipe)

    def with_values(values: Any) -> Device:
        words = {"efficiency": values["efficiency"], "overhead_s": values["overhead_s"]}
        return dataclasses.replace(device, **words)

    found = fit(
        lambda values, size: micro_batch(workload, with_values(values), size).compute_s,
        {"efficiency": device.efficiency, "overhead_s": max(1e-7, device.overhead_s)},
        [(row.micro_batch_size, median(row.compute_s)) for row in rows],
    )
    # What one network says of the device is not as sure of another: `error` stays what it was.
    return with_values(found.values)


def write_cluster(path: Path, cluster: Cluster) -> None:
    """Writes a cluster file; never half of one.

    Raises: RecipeError where its name is not one that the planner reads as a file.
    """
    check_path(path)
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(tomli_w.dumps(as_words(cluster)), encoding="utf-8")
    os.replace(aside, path)


def check_path(path: Path) -> None:
    """Raises: RecipeError."""
    if path.suffix != ".toml":
        raise RecipeError(f"--write is {path}; a cluster file must end in .toml")


def as_words(cluster: Cluster) -> dict[str, Any]:
    """The words of its file, without what is at its default."""
    return {name: value for name, value in _words(cluster).items() if value not in (None, {}, [])}


def _words(value: Any) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        part = getattr(value, each.name)
        if dataclasses.is_dataclass(part):
            words[each.name] = _words(part)
        elif isinstance(part, tuple) and part and dataclasses.is_dataclass(part[0]):
            words[each.name] = [_words(row) for row in part]
        elif part != each.default and part is not None:
            words[each.name] = list(part) if isinstance(part, tuple) else part
    return words
