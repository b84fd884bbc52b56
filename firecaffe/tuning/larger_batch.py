"""The same training in steps of another size: as many samples, the same policy over them."""

from dataclasses import replace
from typing import Any

from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe import Recipe
from firecaffe.train.learning_rate import batch_scale
from firecaffe.train.solver import SolverConfig


def with_batch(recipe: Recipe, global_batch_size: int, num_samples: int) -> Recipe:
    """The recipe at that batch size, with the rate that it had: `base_lr` resolved, no scale.

    Micro-batches stay as they are, so BatchNorm's statistics do. What the recipe counts in steps
    (its length, warm-up, drops of the rate) comes at the same samples, as nearly as whole steps
    can. num_samples: of the training set.

    Raises: RecipeError where two drops of the rate would fall on one step, or the batch is no
    multiple of the micro-batch.
    """
    train = recipe.train
    before, after = (
        SampleOrder(train.seed, num_samples, size, train.micro_batch_size)
        for size in (train.global_batch_size, global_batch_size)
    )
    steps = train.steps and after.steps_for(before.samples_before(train.steps))
    rate = recipe.solver.base_lr * batch_scale(recipe.solver, train.global_batch_size)
    ratio = after.steps_per_epoch / before.steps_per_epoch
    solver = replace(
        recipe.solver,
        base_lr=rate,
        scale="none",
        reference_batch_size=0,
        **_stretched(recipe.solver, ratio),
    )
    eval_every = train.eval_every and max(1, round(train.eval_every * ratio))
    changed = replace(
        train, global_batch_size=global_batch_size, steps=steps, eval_every=eval_every
    )
    return replace(recipe, train=changed, solver=solver)


def _stretched(solver: SolverConfig, ratio: float) -> dict[str, Any]:
    """The policy's words for steps of which `ratio` do what one did before.

    Raises: RecipeError where two drops would fall on one step.
    """
    drops = [round(value * ratio) for value in solver.stepvalue]
    if len(set(drops)) < len(drops):
        raise RecipeError(
            f"solver.stepvalue {solver.stepvalue} would be {drops} at this batch size; "
            "take a smaller batch, or other steps"
        )
    words: dict[str, Any] = {
        "stepvalue": drops,
        "warmup_steps": round(solver.warmup_steps * ratio),
        "stepsize": solver.stepsize and max(1, round(solver.stepsize * ratio)),
    }
    if solver.lr_policy == "exp":
        words["gamma"] = solver.gamma ** (1 / ratio)
    elif solver.lr_policy in ("inv", "sigmoid"):
        words["gamma"] = solver.gamma / ratio
    return words
