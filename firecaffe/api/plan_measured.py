"""Measures steps of a recipe on this host, to replace a cluster's data sheet."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from firecaffe.cluster.groups import check_alone
from firecaffe.cluster.world import join
from firecaffe.data.decode import cores
from firecaffe.errors import MemoryFullError
from firecaffe.measure.step_times import time_steps
from firecaffe.planner.calibrate import MIN_ERROR, jitter_of, relative_spread
from firecaffe.planner.cluster import Cluster
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.resume_advice import option

MIN_S = 2.0


def measured_here(
    recipe: CheckedRecipe, clusters: Sequence[Cluster]
) -> tuple[list[Cluster], list[str]]:
    """Give clusters this host's device and cores; also return a line about them.

    Missing data are replaced by noise of their shape. Raises: LaunchError in one of several ranks,
    MemoryFullError if a micro-batch does not fit a GPU.
    """
    check_alone(f"plan with {option('measure')}")
    size = recipe.train.micro_batch_size
    with join(recipe.train.device) as world:
        try:
            times = time_steps(recipe, world.device, size, MIN_S)
        except torch.OutOfMemoryError as error:
            raise MemoryFullError(
                f"train.micro_batch_size is {size}, which does not fit {world.device}"
            ) from error
        is_gpu = world.device.type == "cuda"
        of_host = "" if is_gpu else f"; each node has the {cores()} cores of this host"
    step = times.measured(recipe)
    step = replace(step, error=max(MIN_ERROR, step.error))
    said = (
        f"measured here: {step.model}, a micro-batch of {size} takes {step.compute_s * 1e3:.3g} "
        f"ms, which may be off by {step.error:.0%}; the update {step.update_s * 1e3:.3g} ms"
        f"{of_host}; memory, prices and power are the cluster's"
    )
    jitter = jitter_of(relative_spread(times.compute_s), times.micro_batches)
    return [
        replace(
            cluster,
            device=replace(cluster.device, measured=(step,), jitter=jitter),
            cores_per_node=0 if is_gpu else cores(),
        )
        for cluster in clusters
    ], [said]
