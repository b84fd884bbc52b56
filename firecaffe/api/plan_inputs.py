"""The trainings to plan, and the clusters: named, offered, or learned from runs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firecaffe.api.argument_checks import (
    DEFAULT_CLUSTER,
    check_count,
    commas,
    filled,
    refuse_beside,
    wrong,
)
from firecaffe.api.plan_layouts import recipe_layout
from firecaffe.api.recipe_argument import network_of, recipe_of
from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.models import ModelConfig
from firecaffe.planner.cluster import Cluster, Device, load_cluster
from firecaffe.planner.memory import most_micro_batch, usual_micro_batch
from firecaffe.planner.offers import MAX_PER_NODE, USUAL_GBIT_PER_S, offers, rates_of
from firecaffe.planner.price import PRICED
from firecaffe.planner.recipe_layout import RecipeLayout
from firecaffe.planner.recipe_workload import workload_of, workload_of_model
from firecaffe.planner.workload import Workload
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.user_code import shown

NO_EFFECT = {
    "device": "write measure modes ways draw fcz all runs",
    "measure": "write precision channels_last runs",
    "html": "compare",
    "runs alone": "args input global_batch_size micro_batch_size workers exchanges compressors "
    "modes ways draw fcz precision channels_last epochs noise_scale all plot html",
    "recipe": "model args input compare global_batch_size micro_batch_size",
}
"""Arguments of `plan` that have no effect, by the argument beside which they have none."""


def check_exclusive(given: Mapping[str, Any]) -> None:
    has_training = given["recipe"] is not None or given["model"] or given["compare"]
    is_given = dict(given, exchanges=given["exchanges"] != "all")
    is_given["runs alone"] = given["runs"] and not has_training
    for word, others in NO_EFFECT.items():
        if is_given[word]:
            what = "a recipe" if word == "recipe" else option(word)
            refuse_beside(what, **{name: is_given[name] for name in others.split()})


MAX_WORKERS = 1_000_000
MIN_BATCH_SIZE = 256
"""Least global batch size of a network alone, if only its micro-batch size is given."""
MIN_MICRO_BATCHES = 32
"""Least micro-batches of a network alone, if no global batch size is given."""


@dataclass(frozen=True)
class PlannedTraining:
    """A training to plan; its layout is that of a recipe with [parallel]."""

    work: Workload
    synchrony: SynchronyConfig
    network: ModelConfig
    layout: RecipeLayout | None = None


Chosen = Callable[[Workload], Workload]
"""Applies the arithmetic and the law of epochs that were asked for to a workload."""


def training_of(recipe: CheckedRecipe, chosen: Chosen) -> PlannedTraining:
    work = chosen(workload_of(recipe))
    return PlannedTraining(work, recipe.synchrony, recipe.model, recipe_layout(recipe, work))


@dataclass(frozen=True)
class NetworkAlone:
    """A network without a recipe, as it was asked for."""

    model: str
    args: Mapping[str, Any]
    input: str
    sizes: tuple[int | None, int | None]
    """The global batch size and the micro-batch size."""
    workers: Sequence[int]
    device: Device


SIZES = ("global_batch_size", "micro_batch_size")


def trainings_of(
    alone: NetworkAlone, compare: Sequence[Recipe | str | Path], chosen: Chosen
) -> dict[str, PlannedTraining]:
    if bool(alone.model) == bool(compare):
        raise RecipeError(f"plan takes a recipe, {option('model')} or {option('compare')}")
    if not compare:
        return {alone.model: _training_alone(alone, chosen)}
    for word, size in zip(SIZES, alone.sizes, strict=True):
        if size is not None:
            raise RecipeError(
                f"{option(word)} goes with {option('model')}; the recipes of "
                f"{option('compare')} say theirs (train.{word})"
            )
    if isinstance(compare, str | Path) or len(compare) != 2:
        raise RecipeError(f"{option('compare')} is {shown(compare)}; expected two recipes")
    return {
        f"recipe {number}" if isinstance(recipe, Recipe) else str(recipe): training_of(
            recipe_of(recipe), chosen
        )
        for number, recipe in enumerate(compare, start=1)
    }


def _training_alone(alone: NetworkAlone, chosen: Chosen) -> PlannedTraining:
    for word, size in zip(SIZES, alone.sizes, strict=True):
        if size is not None:
            check_count(word, size, 1)
    batch, micro = alone.sizes
    network, shape = network_of(alone.model, alone.args, alone.input)
    said = []
    if micro is None:
        one = chosen(workload_of_model(network, shape, 1, 1))
        micro = usual_micro_batch(one, alone.device)
        workers = max([*alone.workers, 1])
        while batch is not None and micro > 1 and (batch % micro or batch // micro < workers):
            micro //= 2
        said.append(
            f"no micro-batch size is given: {micro} is taken, the largest power of two up to "
            f"{most_micro_batch(alone.device)} that fits the device and leaves each worker one"
        )
    if batch is None:
        least = max(1, MIN_BATCH_SIZE // micro) if alone.sizes[1] else MIN_MICRO_BATCHES
        most = max([*alone.workers, 1])
        while most < least:  # 2^k micro-batches a worker: equal shares, which are subtrees
            most *= 2
        batch = most * micro
        said.append(
            f"no global batch size is given: {batch} is taken, {most} "
            f"micro-batches of {micro} for at most as many workers"
        )
    work = chosen(workload_of_model(network, shape, batch, micro))
    return PlannedTraining(replace(work, assumption="; ".join(said)), SynchronyConfig(), network)


def workers_of(given: int | str | Sequence[int] | None) -> list[int]:
    if given is None:
        return []
    typed = filled("workers", commas("workers", given))
    try:
        workers = sorted({int(word) for word in typed.split(",")})
    except ValueError:
        right = "numbers with commas between, as 1,2,4"
        raise wrong("workers", repr(typed), right) from None
    if workers[-1] > MAX_WORKERS:
        raise wrong("workers", workers[-1], f"at most {MAX_WORKERS}")
    return workers


def clusters_of(
    cluster: str | Path | Sequence[str | Path],
    device: str,
    links: str | float | Sequence[float],
    per_node: int,
) -> list[Cluster]:
    """Return the clusters, the slowest link of a device first. Raises: RecipeError."""
    check_count("per_node", per_node, 1)
    if per_node > MAX_PER_NODE:
        raise wrong("per_node", per_node, f"at most {MAX_PER_NODE}")
    if not device:
        refuse_beside("a cluster", links=links, per_node=per_node > 1)
        typed = commas("cluster", cluster)
        if isinstance(cluster, str):
            cluster = typed.split(",")
        # Other values are paths, which may contain commas.
        paths = [cluster] if isinstance(cluster, Path) else cluster
        return [load_cluster(str(path)) for path in paths]
    refuse_beside(option("device"), cluster=cluster != DEFAULT_CLUSTER)
    rates = commas("links", links)
    return offers(device, rates_of(rates) if rates else USUAL_GBIT_PER_S, per_node)


def learn_from(
    clusters: Sequence[Cluster], paths: Sequence[Path], trust_code: bool
) -> tuple[Cluster, list[str]]:
    """Correct the cluster by runs or a file of rates, and say what was learned.

    Raises: RecipeError for several clusters, or nothing to learn from.
    """
    if len(clusters) > 1 or not paths:
        runs, write = option("runs"), option("write")
        what = f"{len(clusters)} clusters" if paths else f"{write} without {runs}"
        raise RecipeError(f"{runs} corrects one cluster and {write} keeps it; found {what}")
    if paths[0].suffix == ".toml":
        cluster, said = _learn_rates(paths, clusters)
    else:
        from firecaffe.planner.calibrate import learn

        cluster, said = learn(clusters[0], paths, trust_code=trust_code)
    return cluster, [f"learned from {', '.join(map(str, paths))}:", *said]


def _learn_rates(paths: Sequence[Path], clusters: Sequence[Cluster]) -> tuple[Cluster, list[str]]:
    from firecaffe.planner.judged_rates import judgement_lines
    from firecaffe.planner.learn_rates import learn_rates, load_rates

    if len(paths) > 1:
        raise RecipeError(
            f"{option('runs')} takes one file of rates, or folders of runs; found {len(paths)} "
            f"paths, of which {paths[0]} is a file"
        )
    is_given = clusters[0].name != DEFAULT_CLUSTER
    refuse_beside(f"{paths[0]}, which names its cluster", cluster=is_given)
    rates, cluster = load_rates(paths[0])
    try:
        learned = learn_rates(cluster, rates.trainings)
    except RecipeError as error:  # of a network
        remedy = "a network that firecaffe does not know needs its parameters and layers"
        raise RecipeError(f"{paths[0]}: {error}; {remedy}") from error
    return learned.whole(), [*learned.lines(), *judgement_lines(learned)]


def exchanges_of(given: str | Sequence[str]) -> list[str] | None:
    """Return the names of exchanges; None for all. Raises RecipeError for an unknown one."""
    text = commas("exchanges", given)
    if text == "all":
        return None
    # Do not split at the comma of hierarchical(INNER,OUTER).
    names = re.split(r",(?![^(]*\))", text)
    for name in names:
        if name == NATIVE:
            continue
        try:
            find_schedule(name)
        except ValueError as error:
            raise RecipeError(f"{option('exchanges')}: {error}") from None
    return names


PLANNED = ", ".join((NO_COMPRESSOR, *PRICED))


def compressors_of(given: str | Sequence[str] | None, recipe: CheckedRecipe | None) -> list[str]:
    """Return the names of codecs; without any, the recipe's and none. Raises: RecipeError."""
    if given is None:
        of_recipe = recipe.exchange.compressor if recipe else NO_COMPRESSOR
        if of_recipe not in (NO_COMPRESSOR, *PRICED):
            raise RecipeError(
                f"exchange.compressor is {of_recipe!r}, which has no forecast: what it sends is "
                f"known in training alone. Plan with {option('compressors')}, some of {PLANNED}"
            )
        return list(dict.fromkeys([NO_COMPRESSOR, of_recipe]))
    text = commas("compressors", given)
    names = [NO_COMPRESSOR, *PRICED] if text == "all" else text.split(",")
    for name in names:
        if name not in (NO_COMPRESSOR, *PRICED):
            raise RecipeError(
                f"{option('compressors')}: no {name!r} to plan with; there are {PLANNED}"
            )
    return names


def powers_of_two(work: Workload, cluster: Cluster) -> list[int]:
    most = min(work.num_micro_batches, cluster.most_devices or MAX_WORKERS)
    return [1 << k for k in range(most.bit_length())]
