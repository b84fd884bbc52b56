"""The `run` argument of a function: a run and its recipe, with the settings that replace some."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firecaffe.api.argument_checks import path_of
from firecaffe.cluster.world import World, join
from firecaffe.errors import RecipeError, RunError
from firecaffe.recipe.checked_recipe import CheckedRecipe, check_recipe, read_recipe_file, untrusted
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import RECIPE
from firecaffe.training.fcz_description import SECTIONS, described, is_coded, with_nets
from firecaffe.training.load import Trained, check_named, load_run, run_of
from firecaffe.user_code import shown

USED = ("data.", "task.", "model.name", "model.args", "train.device", "train.eval_batch_size")
"""Prefixes of the settings that decide how a trained network is used."""

TRAINED = "the run is trained already"


@dataclass(frozen=True)
class RunInUse:
    """A run, and the recipe by which it is used."""

    where: Path
    """The run's folder, a checkpoint in it, or a .fcz file."""
    recipe: CheckedRecipe

    def check_named(self, sections: Collection[str] = SECTIONS) -> None:
        """Raise RecipeError if parts of the sections were given in Python and are not named."""
        check_named(self.where, self.recipe, sections)

    def load(self, best: bool) -> Trained:
        return load_run(self.where, best=best, recipe=self.recipe)

    def join(self) -> AbstractContextManager[World]:
        exchange = self.recipe.exchange
        return join(self.recipe.train.device, exchange.timeout_s, exchange.silent_s)


def open_run(run: Any, replace: Any, trust_code: bool) -> RunInUse:
    """Read a run's recipe, with the settings of `replace`, as {"data.path": "photos"}.

    Code that the run or the file names is not trusted, unless `replace` names it or `trust_code`.
    Raises: RecipeError for a wrong argument; RunError for a missing run; CheckpointError for a
    damaged .fcz file.
    """
    where, replaced = path_of("run", run), _replaced(replace)
    if is_coded(where):
        own, _ = described(where, replaced, trust_code=trust_code)
        recipe, folder = with_nets(where, own, replaced), where
    else:
        folder = folder_of(where)
        recipe = read_recipe_file(folder / RECIPE)
    for word, value in replaced.items():
        recipe = recipe.replace(word, value)
    checked = check_recipe(recipe)
    return RunInUse(where, checked if trust_code else untrusted(checked, folder, replaced))


def folder_of(where: Path) -> Path:
    """Return the folder of a run, given by it or by a checkpoint in it. Raises: RunError."""
    folder = run_of(where)
    if folder is None:
        what = f"no {RECIPE}; this is no run folder" if where.exists() else "there is no run"
        raise RunError(f"{where}: {what}")
    return folder


def _replaced(replace: Any) -> dict[str, Any]:
    if replace is None:
        return {}
    if not isinstance(replace, Mapping) or not all(isinstance(word, str) for word in replace):
        raise RecipeError(
            f"replace is {shown(replace)}; expected settings of the recipe with their values, as "
            '{"data.path": "photos"}'
        )
    for word in replace:
        Recipe().replace(word, None)  # raises if a recipe has no such setting
        if not word.startswith(USED):
            raise RecipeError(f"replace has {word}, which has no effect: {TRAINED}")
    return dict(replace)
