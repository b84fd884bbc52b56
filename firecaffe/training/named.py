"""What of a run was given in Python, and has to be named where a command uses the run."""

from collections.abc import Collection
from pathlib import Path

from firecaffe.data.datasets import GIVEN
from firecaffe.errors import RecipeError
from firecaffe.models.network import GIVEN_IN_PYTHON
from firecaffe.recipe.sections import Recipe
from firecaffe.tasks import TaskConfig
from firecaffe.training.about import read_about
from firecaffe.training.given_task import OWN
from firecaffe.training.load import run_of


def check_named(where: Path, recipe: Recipe, needed: Collection[str]) -> None:
    """recipe: the run's, with the words of a command. needed: sections of it, of model, data and
    task.

    Raises: RecipeError with all that was given in Python and that the recipe does not name;
    RunError if the run's folder is damaged.
    """
    run = run_of(where)
    about = None if run is None else read_about(run)
    unnamed = {}
    if recipe.model.name.startswith(GIVEN_IN_PYTHON):
        unnamed["model"] = f"network {recipe.model.name.removeprefix(GIVEN_IN_PYTHON)}"
    if recipe.data.name == GIVEN:
        unnamed["data"] = "data"
    for word in ("loss", "task"):
        if about and word in about.given and recipe.task.name in (OWN, TaskConfig().name):
            unnamed["task"] = word
    missing = {section: what for section, what in unnamed.items() if section in needed}
    if missing:
        words = " ".join(f"--{section}.name path/file.py:function" for section in missing)
        raise RecipeError(
            f"{where}: given in Python, or not at all, and named nowhere: "
            f"{', '.join(missing.values())}"
            f"; name functions that return the same: {words}"
        )
