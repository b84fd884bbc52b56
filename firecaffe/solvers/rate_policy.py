"""Learning-rate policies by Caffe's formulas (`SGDSolver::GetLearningRate`, `SolverParameter`)."""

import math
from collections.abc import Callable

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import MAY_CYCLE, SolverConfig
from firecaffe.value_checks import FINITE, FROM_1, UP_TO_1, check_choice, check_limits

Policy = Callable[[SolverConfig, int, int], float]
"""(solver, i, max_iter) -> the factor on base_lr in update i, counted from 0."""


def _one_cycle(solver: SolverConfig, i: int, max_iter: int) -> float:
    first = 1 / solver.div_factor
    return _one_cycle_between(solver, i, max_iter, first, 1.0, first / solver.final_div_factor)


def _one_cycle_between(
    solver: SolverConfig, i: int, max_iter: int, first: float, peak: float, last: float
) -> float:
    # Source: Smith and Topin 2018, arXiv 1708.07120, in two phases of half a cosine each, as in
    # torch's OneCycleLR.
    top = solver.pct_start * max_iter - 1
    if i < top:
        start, stop, share = first, peak, i / top
    else:
        start, stop = peak, last
        share = (i - top) / (max_iter - 1 - top) if max_iter - 1 > top else 0.0
    return stop + (start - stop) / 2 * (1 + math.cos(math.pi * share))


POLICIES: dict[str, Policy] = {
    "fixed": lambda solver, i, max_iter: 1.0,
    "step": lambda solver, i, max_iter: math.pow(solver.gamma, i // solver.stepsize),
    "exp": lambda solver, i, max_iter: math.pow(solver.gamma, i),
    "inv": lambda solver, i, max_iter: math.pow(1 + solver.gamma * i, -solver.power),
    "multistep": lambda solver, i, max_iter: math.pow(
        solver.gamma, sum(i >= value for value in solver.stepvalue)
    ),
    "poly": lambda solver, i, max_iter: math.pow(1 - i / max_iter, solver.power),
    "sigmoid": lambda solver, i, max_iter: (
        1 / (1 + math.exp(-solver.gamma * (i - solver.stepsize)))
    ),
    # Source: Loshchilov and Hutter 2017, without restarts.
    "cosine": lambda solver, i, max_iter: (1 + math.cos(math.pi * i / max_iter)) / 2,
    "one_cycle": _one_cycle,
}

LENGTH_DEPENDENT = ("poly", "cosine", "one_cycle")
"""The policies that depend on the length of the training."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda batch, reference: 1.0,
    "linear": lambda batch, reference: batch / reference,
    "sqrt": lambda batch, reference: math.sqrt(batch / reference),
}
"""The rate's growth with the batch: Goyal et al. 2017 (linear), Krizhevsky 2014 (sqrt)."""


def batch_scale(solver: SolverConfig, global_batch_size: int) -> float:
    return SCALES[solver.scale](global_batch_size, solver.reference_batch_size)


def rate_notes(solver: SolverConfig, global_batch_size: int, steps: int) -> list[str]:
    """Return notes for people on a scaled or too short rate; `steps` is 0 if not known yet."""
    notes = []
    if solver.scale != "none":
        factor = batch_scale(solver, global_batch_size)
        notes.append(
            f"learning rate: {solver.base_lr * factor:g} = {solver.base_lr:g} x {factor:g} "
            f"({solver.scale}, batch {global_batch_size} over {solver.reference_batch_size})"
        )
    if 0 < steps < solver.warmup_steps:
        notes.append(
            f"learning rate: the warm-up takes {solver.warmup_steps} steps, the training {steps}, "
            "so the rate is never reached"
        )
    return notes


def learning_rate(solver: SolverConfig, i: int, max_iter: int, scale: float = 1.0) -> float:
    """Return update i's rate: the policy's, scaled; warm-up raises it. Raises: RecipeError."""
    # Source of the warm-up, from the unscaled rate if there is a scale: Goyal et al. 2017, 2.2.
    try:
        rate = solver.base_lr * scale * POLICIES[solver.lr_policy](solver, i, max_iter)
    except (OverflowError, ValueError) as error:
        raise RecipeError(
            f"solver.lr_policy {solver.lr_policy!r} gives no learning rate at step {i} with gamma "
            f"{solver.gamma}, power {solver.power}, stepsize {solver.stepsize}: {error}"
        ) from error
    if i < solver.warmup_steps:
        start = 1 / scale if solver.scale != "none" else 0.0
        rate *= start + (1 - start) * ((i + 1) / solver.warmup_steps)
    return rate


def first_drop(solver: SolverConfig, max_iter: int) -> int | None:
    """Return the first update after warm-up with a lower rate than the one before, or None."""
    rates = [learning_rate(solver, i, max_iter) for i in range(max_iter)]
    after = range(max(1, solver.warmup_steps), max_iter)
    return next((i for i in after if rates[i] < rates[i - 1]), None)


def momentum(solver: SolverConfig, i: int, max_iter: int) -> float | None:
    """Return the momentum of update i, against the rate; None if the policy does not change it."""
    cycles = solver.lr_policy == "one_cycle" and solver.type in MAY_CYCLE
    if not cycles or not solver.base_momentum:
        return None
    # Source: Smith 2018, arXiv 1803.09820, section 4.3.
    ends = solver.momentum
    return _one_cycle_between(solver, i, max_iter, ends, solver.base_momentum, ends)


def check_policy(solver: SolverConfig) -> None:
    """Check the policy. Raises: RecipeError if it is unknown or lacks what its formula needs."""
    if solver.scale not in SCALES:
        raise RecipeError(
            f"solver.scale is {solver.scale!r}; it must be one of {', '.join(SCALES)}"
        )
    policy = solver.lr_policy
    check_choice("solver.lr_policy", policy, POLICIES)
    check_limits("solver", solver, {"gamma": FINITE, "power": FINITE})
    if policy == "one_cycle":
        factors = dict.fromkeys(("div_factor", "final_div_factor"), FROM_1)
        check_limits("solver", solver, {"pct_start": UP_TO_1, **factors})
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
    if policy == "multistep" and min(solver.stepvalue, default=0) < 0:
        raise RecipeError(f"solver.stepvalue is {solver.stepvalue}; steps are counted from 0")
    if policy == "multistep" and not solver.stepvalue:
        raise RecipeError("solver.stepvalue is empty; lr_policy 'multistep' needs steps")
