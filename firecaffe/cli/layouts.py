"""The layouts of `firecaffe verify --layouts 1,data=4,model=2x2,trick=2x2`."""

import dataclasses
import re
from typing import Any

from firecaffe.cli.twin import Twin
from firecaffe.errors import RecipeError
from firecaffe.parallel.config import ONE_WEIRD_TRICK
from firecaffe.recipe.sections import Recipe

SCHEMES: dict[str, Any] = {"model": "none", "trick": ONE_WEIRD_TRICK}
"""The schemes of the layouts whose workers hold a model together; see `ParallelConfig.scheme`."""

NUMBER = r"([1-9]\d{0,3})"
LAYOUT = re.compile(rf"(1)|data={NUMBER}|(model|trick)=(?:{NUMBER}x)?{NUMBER}")


def layouts_of(text: str, recipe: Recipe) -> list[Twin]:
    """The recipe in each of the layouts, which are to come to the same bits.

    Raises: RecipeError if there is no such layout, or the recipe splits no layer.
    """
    words = recipe.parallel
    if not words.is_split:
        raise RecipeError(
            "--layouts: the recipe splits no layer; say parallel.split, or parallel.scheme "
            "one_weird_trick"
        )
    twins: dict[str, Twin] = {}
    for name in text.split(","):
        found = LAYOUT.fullmatch(name)
        if found is None:
            raise RecipeError(
                f"--layouts has {name!r}; a layout is 1, data=D, model=K, model=DxK, trick=K or "
                "trick=DxK, as in 1,data=4,model=2x2"
            )
        one, data, kind, rows, columns = found.groups()
        size = (1, 1) if one else (int(data), 1) if data else (int(rows or 1), int(columns))
        parallel = words.over(*size)
        if kind:
            parallel = dataclasses.replace(parallel, scheme=SCHEMES[kind])
        if not parallel.is_split:
            raise RecipeError(
                f"--layouts has {name!r}: parallel.split does not say which layers are split, and "
                "one_weird_trick's own choice is for trick alone; say parallel.split"
            )
        twin = dataclasses.replace(recipe, parallel=parallel)
        twins[name] = Twin(name, size[0] * size[1], twin)
    if len(twins) < 2:
        raise RecipeError(f"--layouts is {text!r}; verify compares two or more, as 1,model=2x2")
    return list(twins.values())
