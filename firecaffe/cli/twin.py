"""One of several trainings of the same recipe, side by side: `verify` and `demo` compare them."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.hosts import Hosts, check_memory
from firecaffe.cluster.launch import launch
from firecaffe.errors import RecipeError
from firecaffe.files import write_atomically
from firecaffe.recipe.checked_recipe import CheckedRecipe, Prepared
from firecaffe.recipe.identity import to_toml
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
    words = dataclasses.replace(recipe.run, folder=str(folder), digests=digests, tensorboard=False)
    of_run = dataclasses.replace(recipe, run=words)
    write_atomically(path, to_toml(of_run))
    launch(["train", str(path)], Hosts(twin.workers), for_ranks=Prepared(of_run))
    return folder
