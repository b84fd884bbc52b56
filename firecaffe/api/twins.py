"""Trainings of the same recipe that `verify` and `demo` compare: by workers, or by layouts."""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.cluster.hosts import Hosts, check_memory
from firecaffe.cluster.launcher import launch
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.parallel.config import ONE_WEIRD_TRICK, ParallelConfig
from firecaffe.recipe.checked_recipe import CheckedRecipe, Prepared, check_recipe
from firecaffe.recipe.identity import to_toml
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.training.checks import preflight


@dataclass(frozen=True)
class Twin:
    """One of the trainings."""

    name: str
    """As the user has said it: a number of workers, or a layout."""
    workers: int
    recipe: CheckedRecipe


def by_workers(recipe: CheckedRecipe, counts: Iterable[int]) -> list[Twin]:
    """The recipe on these numbers of workers."""
    return [Twin(str(count), count, recipe) for count in counts]


def check_twins(twins: Iterable[Twin]) -> None:
    """Raises: what `preflight` raises for one of them; RecipeError if the bits are those of events.
    Twins have folders of their own.
    """
    for twin in twins:
        _check(twin.recipe, twin.workers)


def _check(recipe: CheckedRecipe, workers: int) -> None:
    if recipe.synchrony.is_served:
        raise RecipeError(
            f"synchrony.mode {recipe.synchrony.mode} gives other results on other numbers of "
            "workers, which cannot be compared; train it, and firecaffe replay RUN computes it anew"
        )
    bare = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, folder=""))
    preflight(bare, workers)
    check_memory(workers)


def train_twin(twin: Twin, parent: Path, digests: bool = False) -> Path:
    """Trains it on local workers; returns the run's folder below `parent`."""
    name, recipe = twin.name, twin.recipe
    if name.isdigit():
        name += f"-worker{'s' if twin.workers > 1 else ''}"
    folder, path = parent / name, parent / f"{name}.toml"
    run = dataclasses.replace(recipe.run, folder=str(folder), digests=digests, tensorboard=False)
    of_run = dataclasses.replace(recipe, run=run)
    write_atomically(path, to_toml(of_run))
    launch(["train", str(path)], Hosts(twin.workers), for_ranks=Prepared(of_run))
    return folder


SCHEMES: dict[str, Any] = {"model": "none", "trick": ONE_WEIRD_TRICK}
"""`ParallelConfig.scheme` of the layouts in which several workers share a model."""

NUMBER = r"([1-9]\d{0,3})"
LAYOUT = re.compile(rf"(1)|(?:data|shards)={NUMBER}|(model|trick|stages)=(?:{NUMBER}x)?{NUMBER}")
STAGES, SHARDS = "stages", "shards"


def layouts_of(text: str, recipe: Recipe) -> list[Twin]:
    """Return the recipe in each of the layouts, which must give the same bits.

    Raises RecipeError for an unknown layout, or if the recipe neither splits a layer nor names
    stages nor updates in shards.
    """
    parallel, exchange = recipe.parallel, recipe.exchange
    in_shards, is_whole = exchange.in_shards, parallel.is_whole
    if is_whole and not in_shards:
        raise RecipeError(
            f"{option('layouts')}: the recipe splits no layer and names "
            "no stages; say parallel.split, "
            "parallel.scheme one_weird_trick, parallel.stages, or exchange.update_at shards"
        )
    twins: dict[str, Twin] = {}
    for name in text.split(","):
        match = LAYOUT.fullmatch(name)
        if match is None:
            raise RecipeError(
                f"{option('layouts')} has {name!r}; a layout is 1, data=D, "
                "shards=D, model=K, trick=K or "
                "stages=K, or of D models model=DxK and so on, as in 1,data=4,model=2x2"
            )
        one, data, kind, rows, columns = match.groups()
        size = (1, 1) if one else (int(data), 1) if data else (int(rows or 1), int(columns))
        is_shared = name.startswith(SHARDS)
        if is_shared and not in_shards:
            raise RecipeError(
                f"{option('layouts')} has shards, but exchange.update_at is all; say shards"
            )
        if kind is not None and is_whole:
            raise RecipeError(
                f"{option('layouts')} has {kind}, but the recipe has "
                "exchange.update_at shards; say shards=D"
            )
        update_at: Any = SHARDS if is_shared or (in_shards and kind is not None) else "all"
        twin = dataclasses.replace(
            recipe,
            parallel=parallel if is_whole else _over(parallel, kind, *size),
            exchange=dataclasses.replace(exchange, update_at=update_at),
        )
        twins[name] = Twin(name, size[0] * size[1], check_recipe(twin))
    if len(twins) < 2:
        raise RecipeError(
            f"{option('layouts')} is {text!r}; verify compares two or more, as 1,model=2x2"
        )
    return list(twins.values())


def _over(config: ParallelConfig, kind: str | None, data: int, size: int) -> ParallelConfig:
    """Return [parallel] for a layout; `kind` is None if each worker holds a whole model."""
    if kind == STAGES:
        if not config.stages:
            raise RecipeError(
                f"{option('layouts')} has stages, but the recipe has no parallel.stages"
            )
        return config.in_stages(data, size)
    parallel = config.over(data, size)
    if kind is None and not config.is_split:
        return parallel
    if kind is not None and not config.is_split:
        raise RecipeError(
            f"{option('layouts')} has {kind}, but the recipe has "
            "parallel.stages and splits no layer; say "
            "stages=K"
        )
    if kind is not None:
        parallel = dataclasses.replace(parallel, scheme=SCHEMES[kind])
    if not parallel.is_split:
        raise RecipeError(
            f"{option('layouts')}: parallel.split does not say which "
            "layers are split, and one_weird_trick's "
            "own choice is for trick alone; say parallel.split"
        )
    return parallel
