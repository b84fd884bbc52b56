"""Recipes read back: from a file, and from the recipe.toml in a run's folder."""

import dataclasses
from collections.abc import Container
from pathlib import Path
from typing import Any, TypeVar

from firecaffe.errors import RecipeError, RunError
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe
from firecaffe.recipe.identity import flatten
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import RECIPE as RECIPE
from firecaffe.runs.run_folder import read_run_recipe
from firecaffe.schema import checked, parse_toml, read_file
from firecaffe.user_code import REFERENCES, Untrusted, is_reference

GONE: dict[str, Any] = {"parallel.head_updates": 1, "parallel.exchange": "at_once"}
"""Settings of earlier versions, each with the value that means today's behaviour."""

Some = TypeVar("Some", bound=Recipe)


def recipe_of(folder: Path, *, trust_code: bool = False) -> CheckedRecipe:
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
    """Read the settings in a recipe's file, by section. Raises: RecipeError."""
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
