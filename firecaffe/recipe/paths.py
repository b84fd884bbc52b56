"""The paths in a recipe: as typed, from the current folder; in a run's recipe, from the root."""

import os
from collections.abc import Callable
from dataclasses import replace

from firecaffe.recipe.sections import Recipe
from firecaffe.reference import REFERENCES, with_file


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with absolute paths, except those in `args`, which are the user's."""
    changes: dict[str, Callable[[str], str]] = {
        "model.weights": _absolute,
        "data.path": _absolute,
        "data.cache": _absolute,
        "synchrony.speeds_from": _absolute,
        "run.cluster": lambda name: _absolute(name) if name.endswith(".toml") else name,
        **{word: lambda name: with_file(name, os.path.abspath) for word in REFERENCES},
    }
    for word, change in changes.items():
        section, _, name = word.partition(".")
        config = getattr(recipe, section)
        config = replace(config, **{name: change(getattr(config, name))})
        recipe = replace(recipe, **{section: config})
    return recipe


def _absolute(path: str) -> str:
    return path if not path or "://" in path else os.path.abspath(os.path.expanduser(path))
