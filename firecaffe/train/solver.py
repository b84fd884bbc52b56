"""The recipe's [solver] section, in Caffe's words, and torch's optimizers behind them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn, optim

from firecaffe.errors import RecipeError


@dataclass(frozen=True)
class SolverConfig:
    """The optimizer and its learning rate. A word that a solver does not use is ignored by it.

    Args:
        type: sgd, nesterov, adagrad, adadelta, rmsprop or adam.
        base_lr: Learning rate before the policy.
        lr_policy: fixed, step, exp, inv, multistep, poly or sigmoid, by Caffe's formulas.
        gamma: Factor or slope of the policy.
        power: Exponent of inv and poly.
        stepsize: Steps between two drops (step), or the middle (sigmoid).
        stepvalue: Steps at which the rate drops (multistep).
        warmup_steps: Steps over which the rate rises linearly to the policy's.
        momentum: Momentum (sgd, nesterov); decay of means (adadelta); beta 1 (adam).
        momentum2: Beta 2 (adam).
        rms_decay: Decay of the mean square (rmsprop).
        delta: Added to a denominator against division by zero (adagrad, adadelta, rmsprop, adam).
        weight_decay: Weight of the L2 penalty.
        clip_gradients: Largest L2 norm of the gradient; 0 does not clip.
    """

    type: str = "sgd"
    base_lr: float = 0.01
    lr_policy: str = "fixed"
    gamma: float = 0.0
    power: float = 1.0
    stepsize: int = 0
    stepvalue: list[int] = field(default_factory=list)
    warmup_steps: int = 0
    momentum: float = 0.9
    momentum2: float = 0.999
    rms_decay: float = 0.99
    delta: float = 1e-8
    weight_decay: float = 0.0
    clip_gradients: float = 0.0


Parameters = Sequence[nn.Parameter]


def _sgd(parameters: Parameters, c: SolverConfig) -> optim.Optimizer:
    return optim.SGD(parameters, c.base_lr, c.momentum, weight_decay=c.weight_decay, foreach=True)


def _nesterov(parameters: Parameters, c: SolverConfig) -> optim.Optimizer:
    return optim.SGD(
        parameters, c.base_lr, c.momentum, weight_decay=c.weight_decay, nesterov=True, foreach=True
    )


def _adagrad(parameters: Parameters, c: SolverConfig) -> optim.Optimizer:
    return optim.Adagrad(
        parameters, c.base_lr, weight_decay=c.weight_decay, eps=c.delta, foreach=True
    )


def _adadelta(parameters: Parameters, c: SolverConfig) -> optim.Optimizer:
    return optim.Adadelta(parameters, c.base_lr, c.momentum, c.delta, c.weight_decay, foreach=True)


def _rmsprop(parameters: Parameters, c: SolverConfig) -> optim.Optimizer:
    return optim.RMSprop(parameters, c.base_lr, c.rms_decay, c.delta, c.weight_decay, foreach=True)


def _adam(parameters: Parameters, c: SolverConfig) -> optim.Optimizer:
    return optim.Adam(
        parameters, c.base_lr, (c.momentum, c.momentum2), c.delta, c.weight_decay, foreach=True
    )


SOLVERS: dict[str, Callable[[Parameters, SolverConfig], optim.Optimizer]] = {
    "sgd": _sgd,
    "nesterov": _nesterov,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
    "adam": _adam,
}


def make_optimizer(parameters: Parameters, config: SolverConfig) -> optim.Optimizer:
    """The solver's optimizer. All use torch's `foreach` form: the form changes bits."""
    return SOLVERS[config.type](parameters, config)


def check_solver(config: SolverConfig) -> None:
    """Raises: RecipeError where the solver is unknown or a number cannot be."""
    if config.type not in SOLVERS:
        raise RecipeError(f"solver.type is {config.type!r}; it must be one of {', '.join(SOLVERS)}")
    for name in ("base_lr", "weight_decay", "clip_gradients", "delta", "warmup_steps"):
        value = getattr(config, name)
        if not 0 <= value < float("inf"):
            raise RecipeError(f"solver.{name} is {value}; it must be 0 or more")
    for name in ("momentum", "momentum2", "rms_decay"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise RecipeError(
                f"solver.{name} is {value}; it must be from 0 up to, not including, 1"
            )
    if config.type == "nesterov" and config.momentum == 0:
        raise RecipeError("solver.momentum is 0; solver.type 'nesterov' needs more")
