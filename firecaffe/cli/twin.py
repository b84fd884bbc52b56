"""One of several trainings of the same recipe, side by side: `verify` and `demo` compare them."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from firecaffe.cluster.hosts import Hosts, check_memory
from firecaffe.cluster.launch import launch
from firecaffe.errors import RecipeError
from firecaffe.recipe.identity import to_toml
from firecaffe.recipe.sections import Recipe
from firecaffe.training.preflight import preflight


def check_twins(recipe: Recipe, counts: Iterable[int]) -> None:
    """Raises: what `preflight` raises for one of these numbers of workers; RecipeError if the bits
    are those of events. Twins have folders of their own.
    """
    if recipe.synchrony.is_served:
        raise RecipeError(
            f"synchrony.mode {recipe.synchrony.mode} has no twins of other numbers of workers: who "
            "was early decides bits; train it, then firecaffe replay RUN, or verify RUN, compares"
        )
    bare = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, folder=""))
    for workers in counts:
        preflight(bare, workers)
        check_memory(workers)


def train_twin(recipe: Recipe, workers: int, parent: Path, digests: bool = False) -> Path:
    """Trains a recipe on so many local workers; returns the run's folder below `parent`."""
    name = f"{workers}-worker{'s' if workers > 1 else ''}"
    folder, path = parent / name, parent / f"{name}.toml"
    words = dataclasses.replace(recipe.run, folder=str(folder), digests=digests, tensorboard=False)
    path.write_text(to_toml(dataclasses.replace(recipe, run=words)), encoding="utf-8")
    launch(["train", str(path)], Hosts(workers))
    return folder
