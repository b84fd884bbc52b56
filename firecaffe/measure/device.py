"""Turns measured steps into a cluster file's device: its rows, and values fitted to them."""

import dataclasses
from collections.abc import Sequence
from statistics import median
from typing import Any

from firecaffe.measure.step_times import StepTimes
from firecaffe.planner.calibrate import fit
from firecaffe.planner.cluster import Cluster, Device
from firecaffe.planner.compute_time import copies_s, micro_batch
from firecaffe.planner.of_recipe import workload_of
from firecaffe.recipe.checked_recipe import CheckedRecipe

SIZES_TO_FIT = 3


def calibrated(cluster: Cluster, recipe: CheckedRecipe, rows: Sequence[StepTimes]) -> Cluster:
    """Add measured steps to the cluster, and fit its device to them if there are enough sizes."""
    key = recipe.model.label, recipe.train.autocast
    kept = tuple(row for row in cluster.device.measured if (row.model, row.autocast) != key)
    device = dataclasses.replace(cluster.device, measured=())
    if len(rows) >= SIZES_TO_FIT:
        device = _fitted(device, recipe, rows)
    device = dataclasses.replace(device, measured=(*kept, *(row.measured(recipe) for row in rows)))
    source = f"measured: steps of {recipe.model.label}"
    sources = tuple(dict.fromkeys([*cluster.sources, source]))
    return dataclasses.replace(cluster, device=device, sources=sources)


def _fitted(device: Device, recipe: CheckedRecipe, rows: Sequence[StepTimes]) -> Device:
    workload = workload_of(recipe)

    def with_values(values: Any) -> Device:
        changes = {"efficiency": values["efficiency"], "overhead_s": values["overhead_s"]}
        return dataclasses.replace(device, **changes)

    def compute_s(values: Any, size: int) -> float:
        device = with_values(values)
        return micro_batch(workload, device, size).compute_s + copies_s(workload, device)

    fitted = fit(
        compute_s,
        {"efficiency": device.efficiency, "overhead_s": max(1e-7, device.overhead_s)},
        [(row.micro_batch_size, median(row.compute_s)) for row in rows],
    )
    # `error` stays, because a fit to one network is less certain for another.
    return within_peak(with_values(fitted.values))


def within_peak(device: Device) -> Device:
    """Cap efficiency at 1 and raise the peak, if steps were faster than the measured peak."""
    more = max(1.0, device.efficiency)
    return dataclasses.replace(
        device,
        efficiency=device.efficiency / more,
        peak_flops={dtype: more * rate for dtype, rate in device.peak_flops.items()},
        memory_bytes_per_s=more * device.memory_bytes_per_s,
    )
