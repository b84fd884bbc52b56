"""Finds the parts of a run that were given in Python, which a command has to name."""

from collections.abc import Collection
from pathlib import Path

from firecaffe.data.datasets import GIVEN
from firecaffe.errors import RecipeError
from firecaffe.models.network import GIVEN_IN_PYTHON
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import replaced
from firecaffe.tasks import TaskConfig
from firecaffe.training.given_parts import OWN
from firecaffe.training.load import run_of
from firecaffe.training.run_facts import read_about


def check_named(where: Path, recipe: Recipe, needed: Collection[str]) -> None:
    """Raise RecipeError with all `needed` sections that were given in Python and are not named."""
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
        raise RecipeError(
            f"{where}: given in Python, or not at all, and named nowhere: "
            f"{', '.join(missing.values())}; name functions that return the same: "
            f"{replaced({f'{section}.name': 'path/file.py:function' for section in missing})}"
        )
