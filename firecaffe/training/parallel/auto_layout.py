"""`parallel.scheme = "auto"`: the planner chooses the layout of the available workers.

It chooses the scheme, and how many workers hold one model. The layers are split as the recipe says,
or else the fully connected ones as in one weird trick, into the recipe's parts. No bit of a result
depends on the choice. Rank 0 prices every layout with the functions of `firecaffe plan`, on the
run's cluster. Between hosts without a named cluster, one link is measured.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from firecaffe.cluster.agree import broadcast_text
from firecaffe.cluster.world import World
from firecaffe.data import Dataset
from firecaffe.errors import FirecaffeError, RecipeError
from firecaffe.generators import generators_kept
from firecaffe.models.network import given_network, with_outline
from firecaffe.parallel.config import AUTO, ParallelConfig
from firecaffe.planner.cluster import Cluster, Link
from firecaffe.planner.forecast import forecasts
from firecaffe.planner.recipe_layout import RecipeLayout, layout_cost
from firecaffe.planner.recipe_workload import cluster_for, workload_of
from firecaffe.planner.split_plans import SplitPlan, exchange_for
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.sections import Recipe
from firecaffe.schema import checked
from firecaffe.training.given_parts import Parts, counts_of, open_parts
from firecaffe.training.parallel.split_network import chosen_layers
from firecaffe.transport.auto_exchange import MIN_STREAM_S
from firecaffe.transport.link import measure_link
from firecaffe.user_code import call


@dataclass(frozen=True)
class LayoutChoice:
    words: ParallelConfig
    reason: str
    predicted_s: dict[str, float]
    """Seconds of a step in each layout that is possible."""


def with_named_split(recipe: CheckedRecipe, dataset: Dataset) -> CheckedRecipe:
    """Name the split layers in a recipe whose layout is to be chosen.

    The recipe then decides the same bits as one that names them. Raises: RecipeError, with the
    layer's name, if one cannot be split so.
    """
    parallel = recipe.parallel
    if parallel.scheme != AUTO or parallel.split:
        return recipe

    def choose(network: nn.Module) -> dict[str, str]:
        return chosen_layers(network, parallel)

    split = with_outline(recipe.model, *counts_of(dataset), choose)
    return recipe.replace("parallel.split", split)


def choose_layout(
    recipe: CheckedRecipe, parts: Parts, world: World
) -> tuple[CheckedRecipe, LayoutChoice | None]:
    """Return the recipe in a layout that rank 0 chooses, and the choice; None if it has a layout.

    All ranks call it. Raises: RecipeError on all ranks if no layout is possible, or none has a
    price; PeerLostError.
    """
    if recipe.parallel.scheme != AUTO:
        return recipe, None
    known = _from_first(world, lambda: asdict(_known_cluster(recipe, world.device)))
    cluster = checked(known, Cluster)
    on_host = world.local_world_size
    if on_host < world.world_size and not recipe.run.cluster:
        cluster = _with_measured_link(cluster, world)

    def choose() -> dict[str, Any]:
        _check_is_new(parts)
        with given_network(parts.model):
            return asdict(_choose(recipe, parts, cluster, world.world_size))

    choice = checked(_from_first(world, choose), LayoutChoice)
    return replace(recipe, parallel=choice.words), choice


def _from_first(world: World, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `make` returns on rank 0. Raises: RecipeError on all ranks; PeerLostError."""
    stated = dict[str, Any]()
    try:
        if world.is_first:
            stated = {"made": make()}
    except FirecaffeError as error:
        stated = {"problem": str(error)}
    answer = json.loads(broadcast_text(world, json.dumps(stated)))
    if "problem" in answer:
        raise RecipeError(answer["problem"])
    made: dict[str, Any] = answer["made"]
    return made


def _known_cluster(recipe: Recipe, device: torch.device) -> Cluster:
    """Return the cluster that the run names, or one with this device. Raises: RecipeError."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    cluster = cluster_for(recipe, name)
    if cluster is None:
        raise RecipeError(
            f"parallel.scheme auto: no cluster is known with {name}; firecaffe check measures one, "
            "which run.cluster names"
        )
    return cluster


def _with_measured_link(cluster: Cluster, world: World) -> Cluster:
    """Return the cluster with the run's hosts and a measured link. All ranks call it."""
    on_host = world.local_world_size
    measurement = measure_link(world, 0, on_host, MIN_STREAM_S)
    outer = Link("measured", measurement.latency_s, measurement.bandwidth_bytes_per_s)
    inner = tuple(replace(link, group=on_host) for link in cluster.links[:1] if on_host > 1)
    return replace(
        cluster,
        name=f"{cluster.name} with a link of {outer.bandwidth_bytes_per_s / 1e6:.1f} MB/s",
        devices_per_node=on_host,
        most_devices=0,
        links=(*inner, outer),
    )


def _check_is_new(parts: Parts) -> None:
    """Raise RecipeError if model() returns one network twice, made before its seed is set."""
    if parts.model is None:
        return
    with generators_kept():
        one, other = (call("model", "model()", parts.model, {}) for _ in range(2))
    if one is other:
        raise RecipeError(
            "parallel.scheme auto: model() returned the same network twice; the layout is chosen "
            "with one that is not trained, so return a new one each time"
        )


def _choose(recipe: CheckedRecipe, parts: Parts, cluster: Cluster, workers: int) -> LayoutChoice:
    data = open_parts(recipe, parts)
    recipe = with_named_split(recipe, data.train)
    parallel = recipe.parallel
    chosen = with_outline(
        recipe.model, *counts_of(data.train), lambda network: chosen_layers(network, parallel)
    )
    work = workload_of(recipe, data)
    exchange = "tree"
    if workers <= work.num_micro_batches:  # else the planner has no rows by data
        exchange = exchange_for(forecasts(work, cluster, [workers]), workers)
    cost = layout_cost(recipe.model, work, RecipeLayout.of(recipe, chosen))
    plans = cost.plans(cluster, workers, exchange)
    assert plans[0].words is not None
    said = "; ".join(map(_line, plans))
    predicted_s = {_way(plan): plan.step.step_s for plan in plans}
    reason = f"{said} (planned on {cluster.name}; no bit depends on it)"
    return LayoutChoice(plans[0].words, reason, predicted_s)


def _way(plan: SplitPlan) -> str:
    assert plan.words is not None
    scheme = "by data" if plan.model == 1 else plan.words.scheme
    return f"{scheme} {plan.words.data} x {plan.model}"


def _line(plan: SplitPlan) -> str:
    step, lacks = plan.step, "" if plan.fits else ", more memory than there is"
    sent = f"{step.gradients_bytes / 1e6:,.3g} + {step.activations_bytes / 1e6:,.3g} MB"
    return f"{_way(plan)} {step.step_s:.3g} s a step, sends {sent}{lacks}"


def notes_of_layout(choice: LayoutChoice | None) -> Sequence[str]:
    return [] if choice is None else [f"parallel: {choice.reason}"]
