"""Converts a training to another batch size: as many samples, the same policy over them."""

from dataclasses import replace
from typing import Any

from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.rate_policy import batch_scale


def with_batch(recipe: Recipe, global_batch_size: int, num_samples: int) -> Recipe:
    """Return the recipe at that batch size, with its old rate as `base_lr` and no scale.

    Micro-batches keep their size. What the recipe counts in steps (length, warm-up, drops of the
    rate) happens at the same samples, in whole steps. num_samples: the size of the training set.
    Raises: RecipeError if two drops would fall on one step, or the batch is no multiple of the
    micro-batch.
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
        **_stretched(recipe.solver, ratio, train.num_steps(before.steps_per_epoch)),
    )
    eval_every = train.eval_every and max(1, round(train.eval_every * ratio))
    changed = replace(
        train, global_batch_size=global_batch_size, steps=steps, eval_every=eval_every
    )
    return replace(recipe, train=changed, solver=solver)


def _stretched(solver: SolverConfig, ratio: float, steps: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "warmup_steps": solver.warmup_steps and max(1, round(solver.warmup_steps * ratio)),
        "stepsize": solver.stepsize and max(1, round(solver.stepsize * ratio)),
    }
    if solver.lr_policy in ("step", "multistep"):
        is_even = solver.lr_policy == "step"
        places = range(solver.stepsize, steps, solver.stepsize) if is_even else solver.stepvalue
        drops = [round(place * ratio) for place in places]
        if len({0, *drops}) <= len(drops):
            raise RecipeError(
                f"the rate's drops after steps {', '.join(map(str, places))} would come after "
                f"{', '.join(map(str, drops))} at this batch size; take a smaller batch"
            )
        policy = "multistep" if drops else "fixed"
        settings |= {"lr_policy": policy, "stepvalue": drops, "stepsize": 0}
    if solver.lr_policy == "exp":
        settings["gamma"] = solver.gamma ** (1 / ratio)
    elif solver.lr_policy in ("inv", "sigmoid"):
        settings["gamma"] = solver.gamma / ratio
    return settings
