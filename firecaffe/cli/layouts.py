"""The layouts of `firecaffe verify --layouts 1,data=4,model=2x2,trick=2x2,stages=2x2,shards=4`."""

import dataclasses
import re
from typing import Any

from firecaffe.cli.twin import Twin
from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ONE_WEIRD_TRICK, ParallelConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe

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
    words, exchange = recipe.parallel, recipe.exchange
    in_shards, is_whole = exchange.in_shards, words.is_whole
    if is_whole and not in_shards:
        raise RecipeError(
            "--layouts: the recipe splits no layer and names no stages; say parallel.split, "
            "parallel.scheme one_weird_trick, parallel.stages, or exchange.update_at shards"
        )
    twins: dict[str, Twin] = {}
    for name in text.split(","):
        found = LAYOUT.fullmatch(name)
        if found is None:
            raise RecipeError(
                f"--layouts has {name!r}; a layout is 1, data=D, shards=D, model=K, trick=K or "
                "stages=K, or of D models model=DxK and so on, as in 1,data=4,model=2x2"
            )
        one, data, kind, rows, columns = found.groups()
        size = (1, 1) if one else (int(data), 1) if data else (int(rows or 1), int(columns))
        is_shared = name.startswith(SHARDS)
        if is_shared and not in_shards:
            raise RecipeError("--layouts has shards, but exchange.update_at is all; say shards")
        if kind is not None and is_whole:
            raise RecipeError(
                f"--layouts has {kind}, but the recipe has exchange.update_at shards; say shards=D"
            )
        update_at: Any = SHARDS if is_shared or (in_shards and kind is not None) else "all"
        twin = dataclasses.replace(
            recipe,
            parallel=words if is_whole else _over(words, kind, *size),
            exchange=dataclasses.replace(exchange, update_at=update_at),
        )
        twins[name] = Twin(name, size[0] * size[1], check_recipe(twin))
    if len(twins) < 2:
        raise RecipeError(f"--layouts is {text!r}; verify compares two or more, as 1,model=2x2")
    return list(twins.values())


def _over(words: ParallelConfig, kind: str | None, data: int, size: int) -> ParallelConfig:
    """Return [parallel] for a layout; `kind` is None if each worker holds a whole model."""
    if kind == STAGES:
        if not words.stages:
            raise RecipeError("--layouts has stages, but the recipe has no parallel.stages")
        return words.in_stages(data, size)
    parallel = words.over(data, size)
    if kind is None and not words.is_split:
        return parallel
    if kind is not None and not words.is_split:
        raise RecipeError(
            f"--layouts has {kind}, but the recipe has parallel.stages and splits no layer; say "
            "stages=K"
        )
    if kind is not None:
        parallel = dataclasses.replace(parallel, scheme=SCHEMES[kind])
    if not parallel.is_split:
        raise RecipeError(
            "--layouts: parallel.split does not say which layers are split, and one_weird_trick's "
            "own choice is for trick alone; say parallel.split"
        )
    return parallel
