"""Chooses the learning rates that a search tries first at another batch size.

Rules: linear (Goyal et al. 2017), square root (Krizhevsky 2014, arXiv 1404.5997), and FireCaffe's
sweep from the linear rate to its 16th (Iandola et al. 2016, section 5.2). Layer-wise solvers start
from fixed rates, which do not depend on the recipe's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from firecaffe.errors import RecipeError
from firecaffe.recipe.refusals import check_together, is_refused
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.optimizer import SOLVERS

SWEEP = {
    "linear": 1.0,
    "linear / 2": 1 / 2,
    "linear / 4": 1 / 4,
    "linear / 8": 1 / 8,
    "linear / 16": 1 / 16,
}
ABOVE_SWEEP = {"linear x 2": 2.0}
"""A rate above the linear one, as an untuned base rate may be low; divergence costs little."""

OWN_SWEEP = {"its own": 1.0, "x 2": 2.0, "/ 2": 1 / 2, "x 4": 4.0, "/ 4": 1 / 4}

LARS_RATE = 16.0
"""Our choice: with a trust of 0.001 a step moves a layer by 1.6 % before momentum."""

LAMB_RATE, LAMB_BATCH = 0.04, 32_768
"""ResNet-50's rate and batch, for the square-root rule (You et al. 2020, arXiv 1904.00962)."""

WARMUP_SHARES = (0.15, 0.0)
"""Shares of a training over which the rate rises; Goyal's 5 of 90 is too steep for few epochs."""


@dataclass(frozen=True)
class Candidate:
    solver: str
    base_lr: float
    warmup_share: float
    rule: str


def rules(recipe: Recipe, previous_batch: int, solvers: Sequence[str]) -> list[Candidate]:
    """List the candidates, best guesses first.

    recipe: at the new batch size, with the rate of the previous one. Raises: RecipeError if a
    solver does not exist, or the rest of the recipe excludes it.
    """
    found = [
        Candidate(solver, base * factor, share, rule)
        for solver in solvers
        for share in _shares(recipe)
        for base, sweep in [_sweep(recipe, previous_batch, solver)]
        for rule, factor in sweep.items()
    ]
    for each in found:
        check_together(apply(recipe, each, steps=1))
    unlike = {(each.solver, f"{each.base_lr:.6g}", each.warmup_share): each for each in found}
    return list(unlike.values())


def _shares(recipe: Recipe) -> Sequence[float]:
    warmed = replace(recipe, solver=replace(recipe.solver, warmup_steps=1))
    return (0.0,) if recipe.solver.warmup_steps or is_refused(warmed) else WARMUP_SHARES


def _sweep(recipe: Recipe, previous_batch: int, solver: str) -> tuple[float, dict[str, float]]:
    batch, own = recipe.train.global_batch_size, recipe.solver.base_lr
    if own == 0:
        raise RecipeError("solver.base_lr is 0; no rule finds a rate from that")
    if solver not in SOLVERS:
        raise RecipeError(f"--solvers has {solver!r}; they are {', '.join(SOLVERS)}")
    if solver != recipe.solver.type:
        if solver == "lars":
            return LARS_RATE, SWEEP_OF["lars"]
        if solver == "lamb":
            return LAMB_RATE * sqrt(batch / LAMB_BATCH), SWEEP_OF["lamb"]
        raise RecipeError(
            f"--solvers has {solver!r}, for which no rule says a rate from that of "
            f"{recipe.solver.type!r}; tune a recipe with that solver instead"
        )
    if batch == previous_batch:
        return own, OWN_SWEEP
    ratio = batch / previous_batch
    return own * ratio, {"linear": 1.0, "square root": sqrt(1 / ratio), **ABOVE_SWEEP, **SWEEP}


SWEEP_OF = {
    "lars": {rule.replace("linear", "lars"): factor for rule, factor in SWEEP.items()},
    "lamb": {"lamb": 1.0, "lamb x 4": 4.0, "lamb / 4": 1 / 4},
}


def apply(recipe: Recipe, candidate: Candidate, steps: int) -> Recipe:
    solver = replace(recipe.solver, type=candidate.solver, base_lr=candidate.base_lr)
    if candidate.warmup_share:
        solver = replace(solver, warmup_steps=max(1, round(candidate.warmup_share * steps)))
    if is_refused(replace(recipe, solver=solver)):  # the solver may lack Caffe's form
        solver = replace(solver, momentum_form="torch", momentum_correction=False)
    return replace(recipe, solver=solver)
