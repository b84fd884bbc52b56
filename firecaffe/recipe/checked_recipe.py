"""The check of a recipe, of all that its settings alone can show; and recipes from files."""

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NewType, TypeVar

from firecaffe.compression import check_prune, check_share
from firecaffe.errors import RecipeError, RunError
from firecaffe.gradients.config import check_exchange
from firecaffe.parallel.config import check_parallel
from firecaffe.recipe.fits import check_fits
from firecaffe.recipe.refusals import check_together
from firecaffe.recipe.sections import Recipe, flatten
from firecaffe.runs.record import check_loggers
from firecaffe.runs.run_folder import RECIPE, read_run_recipe
from firecaffe.schema import checked, parse_toml, read_file
from firecaffe.solvers.rate_policy import check_policy
from firecaffe.synchrony.config import check_synchrony
from firecaffe.user_code import REFERENCES, Untrusted, is_reference
from firecaffe.value_checks import (
    BELOW_1,
    MAX_SAMPLES,
    MAX_STEPS,
    MAX_THREADS,
    NOT_NEGATIVE,
    UP_TO_1,
    Limits,
    check_limits,
    check_types,
)

CheckedRecipe = NewType("CheckedRecipe", Recipe)
"""A recipe whose settings are possible, each by itself and all together."""


@dataclass(frozen=True)
class Prepared:
    """A training from the command line, as a launcher hands it to its ranks."""

    recipe: CheckedRecipe
    resume: Path | None = None
    """A run folder or a checkpoint to continue from."""


_LIMITS: dict[str, dict[str, Limits]] = {
    "train": {
        "global_batch_size": (1, MAX_SAMPLES),
        "micro_batch_size": (1, MAX_SAMPLES),
        "eval_batch_size": (1, MAX_SAMPLES),
        "batch_norm_samples": (0, MAX_SAMPLES),
        "threads": (1, MAX_THREADS),
        "steps": (0, MAX_STEPS),
        "epochs": (0, MAX_STEPS),
        "eval_every": (0, MAX_STEPS),
        "stop_after": (0, MAX_STEPS),
        "ema_decay": BELOW_1,
    },
    "data": {"mixup": NOT_NEGATIVE, "cutmix": NOT_NEGATIVE, "erasing": UP_TO_1},
    "checkpoint": {"every": (0, inf), "keep_last": (0, inf)},
}


def check_recipe(recipe: Recipe, **given: Any) -> CheckedRecipe:
    """Check each setting, settings together, and whether numbers fit; `given`: see `terms.GIVEN`.

    Raises: RecipeError with the setting's dotted name, what was found and what would be right.
    """
    # These load torch, which reading a recipe does not need.
    from firecaffe.solvers.optimizer import check_solver
    from firecaffe.tasks.known_tasks import check_task

    check_types(recipe)
    check_task(recipe.task)
    for section, limits in _LIMITS.items():
        check_limits(section, getattr(recipe, section), limits)
    if not 0 <= (every_s := recipe.checkpoint.every_s) < inf:
        raise RecipeError(f"checkpoint.every_s is {every_s:g}; it must be 0 or more seconds")
    check_solver(recipe.solver)
    check_policy(recipe.solver)
    check_exchange(recipe.exchange)
    check_synchrony(recipe.synchrony)
    check_parallel(recipe.parallel)
    check_prune(recipe.prune)
    check_share(recipe.share)
    check_loggers(recipe.run.loggers)
    check_together(recipe, **given)
    check_fits(recipe)
    return CheckedRecipe(recipe)


GONE: dict[str, Any] = {"parallel.head_updates": 1, "parallel.exchange": "at_once"}
"""Settings of earlier versions, each with the value that means today's behaviour."""

Some = TypeVar("Some", bound=Recipe)


def recipe_of_run(folder: Path, *, trust_code: bool = False) -> CheckedRecipe:
    """Read the recipe of a run's folder. `trust_code` lets its code run. Raises: RunError.

    Settings newer than the run have their defaults. Those of `GONE` are left out.
    """
    sections = read_run_recipe(folder)
    try:
        recipe = check_recipe(recipe_from(sections))
    except RecipeError as error:
        raise RunError(f"{folder / RECIPE}: {error}") from error
    return recipe if trust_code else untrusted(recipe, folder)


def untrusted(recipe: Some, where: Path, named: Container[str] = ()) -> Some:
    """Mark a recipe's code references as not trusted, except settings `named` by the user."""
    settings = flatten(recipe)
    for word in REFERENCES:
        if is_reference(settings[word]) and word not in named:
            recipe = recipe.replace(word, Untrusted(settings[word], str(where)))
    return recipe


def read_sections(path: Path) -> dict[str, dict[str, Any]]:
    sections = read_file(path, dict[str, Any], RecipeError, parse_toml, where=f"recipe {path}")
    known = tuple(Recipe.__dataclass_fields__)
    for name, value in sections.items():
        if name not in known:
            raise RecipeError(f"recipe {path}: no section {name!r}; there are {', '.join(known)}")
        if not isinstance(value, dict):
            raise RecipeError(
                f"recipe {path}: {name} is {value!r}; expected a section, [{name}], and "
                "then a setting on each line"
            )
    return sections


def read_recipe_file(path: Path) -> Recipe:
    """Read a recipe's file, which has not been checked. Raises: RecipeError."""
    sections = read_sections(path)
    try:
        return recipe_from(sections)
    except RecipeError as error:
        raise RecipeError(f"recipe {path}: {error}") from error


def recipe_from(sections: dict[str, Any]) -> Recipe:
    """Make an unchecked recipe of sections and defaults. Raises: RecipeError if one is unknown."""
    default = Recipe()
    configs = {}
    for name, settings in sections.items():
        if not isinstance(settings, dict) or name not in Recipe.__dataclass_fields__:
            raise RecipeError(f"{name}: a recipe has no such section")
        config = getattr(default, name)
        settings = {
            word: value
            for word, value in settings.items()
            if (key := f"{name}.{word}") not in GONE or value != GONE[key]
        }
        for word in settings.keys() - config.__dataclass_fields__.keys():
            raise RecipeError(f"{name}.{word}: a recipe has no such word")
        try:
            checked(settings, type(config))
        except ValueError as error:
            raise RecipeError(f"{name}{str(error).removeprefix('$')}") from error
        configs[name] = dataclasses.replace(config, **settings)
    return dataclasses.replace(default, **configs)
