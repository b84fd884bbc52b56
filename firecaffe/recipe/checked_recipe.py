"""The check of a recipe: of everything that its settings alone can show."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType

from firecaffe.compression import check_prune, check_share
from firecaffe.gradients.config import check_exchange
from firecaffe.parallel.config import check_parallel
from firecaffe.recipe.config import check_checkpoint, check_mixing, check_train
from firecaffe.recipe.fits import check_fits
from firecaffe.recipe.refusals import check_together
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.record import check_loggers
from firecaffe.solvers.rate_policy import check_policy
from firecaffe.synchrony.config import check_synchrony
from firecaffe.value_checks import check_types

CheckedRecipe = NewType("CheckedRecipe", Recipe)
"""A recipe whose settings are possible, each by itself and all together."""


@dataclass(frozen=True)
class Prepared:
    """A training from the command line, as a launcher hands it to its ranks."""

    recipe: CheckedRecipe
    resume: Path | None = None
    """A run folder or a checkpoint to continue from."""


def check_recipe(recipe: Recipe, **given: Any) -> CheckedRecipe:
    """Check each setting, settings together, and whether numbers fit; `given`: see `terms.GIVEN`.

    Raises: RecipeError with the setting's dotted name, what was found and what would be right.
    """
    # These load torch, which reading a recipe does not need.
    from firecaffe.solvers.optimizer import check_solver
    from firecaffe.tasks.known_tasks import check_task

    check_types(recipe)
    check_task(recipe.task)
    check_train(recipe.train)
    check_mixing(recipe.data)
    check_solver(recipe.solver)
    check_policy(recipe.solver)
    check_exchange(recipe.exchange)
    check_synchrony(recipe.synchrony)
    check_parallel(recipe.parallel)
    check_prune(recipe.prune)
    check_share(recipe.share)
    check_loggers(recipe.run.loggers)
    check_checkpoint(recipe.checkpoint)
    check_together(recipe, **given)
    check_fits(recipe)
    return CheckedRecipe(recipe)
