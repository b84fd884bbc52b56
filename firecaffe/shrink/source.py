"""The trained network that is made small: a finished run's, or a recipe's with its weights."""

from dataclasses import replace
from pathlib import Path

from firecaffe.errors import RecipeError, RunError
from firecaffe.recipe.of_run import RECIPE
from firecaffe.recipe.sections import Recipe
from firecaffe.training.checkpoint import BEST
from firecaffe.training.load import run_of


def recipe_of_run(where: Path, recipe: Recipe, best: bool) -> Recipe:
    """The run's recipe with the weights that it has found. where: the run's folder, a checkpoint in
    it, or a file of weights there.

    Raises: RunError if the run has not finished; RecipeError if best is asked of a checkpoint.
    """
    folder = run_of(where)
    if folder is None:
        raise RunError(f"{where}: no {RECIPE}; this is no run folder")
    if not (folder / "result.json").is_file():
        raise RunError(
            f"{folder}: has not finished; firecaffe train {folder / RECIPE} --resume {folder}"
        )
    if best and where != folder:
        raise RecipeError(f"--best is asked of a run's folder; {where} is one checkpoint of it")
    weights = folder / "checkpoints" / BEST if best else where
    return replace(recipe, model=replace(recipe.model, weights=str(weights)))


def check_weights(recipe: Recipe, file: Path) -> None:
    """Raises: RecipeError if a recipe's file does not say where the trained weights are."""
    if not recipe.model.weights:
        raise RecipeError(
            f"{file}: model.weights is empty; compress takes a finished run, or a recipe whose "
            "model.weights are those of a trained network"
        )
