"""Learning-rate policies: the rate of update i, counted from 0, by Caffe's formulas.

Source: `SGDSolver::GetLearningRate` and the comments of `SolverParameter` in BVLC Caffe.
"""

import math
from collections.abc import Callable

from firecaffe.errors import RecipeError
from firecaffe.train.solver import SolverConfig

Policy = Callable[[SolverConfig, int, int], float]
"""(solver, i, max_iter) -> the factor on base_lr."""


def _fixed(solver: SolverConfig, i: int, max_iter: int) -> float:
    return 1.0


def _step(solver: SolverConfig, i: int, max_iter: int) -> float:
    return math.pow(solver.gamma, i // solver.stepsize)


def _exp(solver: SolverConfig, i: int, max_iter: int) -> float:
    return math.pow(solver.gamma, i)


def _inv(solver: SolverConfig, i: int, max_iter: int) -> float:
    return math.pow(1 + solver.gamma * i, -solver.power)


def _multistep(solver: SolverConfig, i: int, max_iter: int) -> float:
    return math.pow(solver.gamma, sum(i >= value for value in solver.stepvalue))


def _poly(solver: SolverConfig, i: int, max_iter: int) -> float:
    return math.pow(1 - i / max_iter, solver.power)


def _sigmoid(solver: SolverConfig, i: int, max_iter: int) -> float:
    return 1 / (1 + math.exp(-solver.gamma * (i - solver.stepsize)))


POLICIES: dict[str, Policy] = {
    "fixed": _fixed,
    "step": _step,
    "exp": _exp,
    "inv": _inv,
    "multistep": _multistep,
    "poly": _poly,
    "sigmoid": _sigmoid,
}


def learning_rate(solver: SolverConfig, i: int, max_iter: int) -> float:
    """The rate of update i of max_iter; rises linearly over the first `warmup_steps` updates.

    Source of the warm-up: Goyal et al. 2017, section 2.2.

    Raises: RecipeError where the policy's formula has no value.
    """
    try:
        rate = solver.base_lr * POLICIES[solver.lr_policy](solver, i, max_iter)
    except (OverflowError, ValueError) as error:
        raise RecipeError(
            f"solver.lr_policy {solver.lr_policy!r} gives no learning rate at step {i} with gamma "
            f"{solver.gamma}, power {solver.power}, stepsize {solver.stepsize}: {error}"
        ) from error
    if i < solver.warmup_steps:
        rate *= (i + 1) / solver.warmup_steps
    return rate


def check_policy(solver: SolverConfig) -> None:
    """Raises: RecipeError where the policy is unknown or lacks what its formula needs."""
    policy = solver.lr_policy
    if policy not in POLICIES:
        raise RecipeError(
            f"solver.lr_policy is {policy!r}; it must be one of {', '.join(POLICIES)}"
        )
    for name in ("gamma", "power"):
        if not math.isfinite(getattr(solver, name)):
            raise RecipeError(f"solver.{name} is {getattr(solver, name)}; it must be finite")
    if policy in ("step", "exp", "inv", "multistep") and solver.gamma <= 0:
        raise RecipeError(f"solver.gamma is {solver.gamma}; lr_policy {policy!r} needs more than 0")
    if policy == "sigmoid" and solver.gamma == 0:
        raise RecipeError("solver.gamma is 0; lr_policy 'sigmoid' needs a slope")
    if policy == "step" and solver.stepsize < 1:
        raise RecipeError(
            f"solver.stepsize is {solver.stepsize}; lr_policy 'step' needs at least 1"
        )
    if policy == "multistep" and sorted(set(solver.stepvalue)) != solver.stepvalue:
        raise RecipeError(f"solver.stepvalue is {solver.stepvalue}; it must be in rising order")
    if policy == "multistep" and not solver.stepvalue:
        raise RecipeError("solver.stepvalue is empty; lr_policy 'multistep' needs steps")
