"""Makes the optimizer of the recipe's [solver] section, or the user's own, and sets its rate.

A user's optimizer is made like torch's, by Class(groups, lr=…, **solver.args). The policy writes
the rate into the groups before each step. A checkpoint holds only state that is stored where
torch's optimizers store it: tensors and numbers by parameter, numbers in the groups.
"""

import inspect
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.update_rules import (
    CaffeAdam,
    CaffeSGD,
    DelayedNesterov,
    Lamb,
    Lars,
    LayerRates,
    Norms,
    own_norms,
    trained,
)
from firecaffe.user_code import call, find, is_reference, shown
from firecaffe.value_checks import BELOW_1, NOT_NEGATIVE, check_choice, check_limits

RECIPE_ARGS = {"lr": "solver.base_lr", "weight_decay": "solver.weight_decay"}

NUMBERS = (int, float, str, type(None))
"""The types that a checkpoint holds besides tensors; True and False are int."""


def make_own(groups: Sequence[dict[str, Any]], config: SolverConfig) -> optim.Optimizer:
    """Make a user's optimizer. Raises: RecipeError if it cannot step or be saved; OwnCodeError."""
    made = find("solver.type", config.type)
    for name, word in RECIPE_ARGS.items():
        if name in config.args:
            raise RecipeError(
                f"solver.args has {name!r}; it is {word}, which the policy starts from"
            )
    arguments = {"lr": config.base_lr, **config.args}
    optimizer = call("solver.type", config.type, partial(made, list(groups)), arguments)
    if not isinstance(optimizer, optim.Optimizer):
        raise RecipeError(
            f"solver.type {config.type!r} gave {shown(optimizer)}; expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, optim.SparseAdam):
        raise RecipeError(
            f"solver.type {config.type!r} takes sparse gradients alone, and sums over workers are "
            "dense; torch.optim:Adam takes them"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(optimizer.step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise RecipeError(
            f"solver.type {config.type!r} has a step({', '.join(needed)}); there is one gradient "
            "of a step, summed over all workers, and step() is called without arguments"
        )
    if config.weight_decay and "weight_decay" not in optimizer.defaults:
        raise RecipeError(
            f"solver.weight_decay is {config.weight_decay}, but solver.type {config.type!r} has no "
            "weight_decay; leave it out"
        )

    made_with = _attributes(optimizer)

    def check_once(*_: object) -> None:
        if optimizer.state:  # not right after the first step, which a subclass may extend
            handle.remove()
            check_kept(optimizer, config.type, made_with)

    handle = optimizer.register_step_pre_hook(check_once)
    return optimizer


def decay_notes(optimizer: optim.Optimizer, config: SolverConfig) -> list[str]:
    """Return a note if a user's optimizer has a decay by default, which the recipe's 0 replaces."""
    usual = optimizer.defaults.get("weight_decay")
    if not isinstance(usual, int | float) or not usual:
        return []
    if not is_reference(config.type) or config.weight_decay:
        return []
    return [
        f"warning: {config.type} has weight_decay {usual:g} by default, and solver.weight_decay, "
        f"which is {config.weight_decay:g}, counts"
    ]


class _Pickled(pickle.Pickler):
    """Pickles an attribute without what checkpoints hold: parameters, and their groups."""

    groups: Sequence[object]

    def persistent_id(self, value: object) -> str | None:
        is_held = isinstance(value, nn.Parameter) or any(value is held for held in self.groups)
        return "held" if is_held else None


def _attributes(optimizer: optim.Optimizer) -> dict[str, bytes]:
    """Pickle the attributes that can be pickled, without torch's state, groups and hooks."""
    pickled = {}
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups") and not name.startswith("_optimizer_"):
            pickler = _Pickled(content := io.BytesIO())
            pickler.groups = optimizer.param_groups
            with suppress(Exception):  # code, locks and the like cannot be pickled
                pickler.dump(value)
                pickled[name] = content.getvalue()
    return pickled


def check_kept(optimizer: optim.Optimizer, name: str, made_with: Mapping[str, bytes]) -> None:
    """Raise RecipeError if a checkpoint would not hold all state. made_with: attributes before."""
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    wrong = [
        f"state_dict()[{key!r}]"
        for key in optimizer.state_dict()
        if key not in ("state", "param_groups")
    ]
    wrong += [f"state[{shown(key)}]" for key in optimizer.state if key not in known]
    wrong += [
        f"{key!r} of a parameter, {shown(value)}"
        for parameter in known
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, (Tensor, *NUMBERS))
    ]
    wrong += [
        f"{key!r} of a group, {shown(value)}"
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params" and not _is_number(value)
    ]
    now = _attributes(optimizer).items()
    wrong += [f"self.{name}" for name, content in now if made_with.get(name) != content]
    if wrong:
        raise RecipeError(
            f"solver.type {name!r} keeps {wrong[0]}, which a checkpoint does not hold; it holds "
            "tensors and numbers in state[parameter], and numbers in the groups"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, NUMBERS)


Groups = Sequence[dict[str, Any]]
"""Groups of parameters, with their weight decay and `rate_factor`, which multiplies the rate."""


def _sgd(groups: Groups, c: SolverConfig) -> optim.Optimizer:
    nesterov = c.type == "nesterov"
    if c.momentum_form == "caffe":
        correction = c.momentum_correction
        return CaffeSGD(groups, c.base_lr, c.momentum, c.weight_decay, nesterov, correction)
    return optim.SGD(
        groups,
        c.base_lr,
        c.momentum,
        weight_decay=c.weight_decay,
        nesterov=nesterov,
        foreach=True,
    )


def _of_adam(c: SolverConfig) -> dict[str, Any]:
    betas = (c.momentum, c.momentum2)
    return {"lr": c.base_lr, "betas": betas, "delta": c.delta, "weight_decay": c.weight_decay}


def _adam(groups: Groups, c: SolverConfig) -> optim.Optimizer:
    betas = (c.momentum, c.momentum2)
    if c.momentum_form == "caffe":
        return CaffeAdam(groups, _of_adam(c))
    return optim.Adam(groups, c.base_lr, betas, c.delta, c.weight_decay, foreach=True)


SOLVERS: dict[str, Callable[[Groups, SolverConfig], optim.Optimizer]] = {
    "sgd": _sgd,
    "nesterov": _sgd,
    "adagrad": lambda groups, c: optim.Adagrad(
        groups, c.base_lr, weight_decay=c.weight_decay, eps=c.delta, foreach=True
    ),
    "adadelta": lambda groups, c: optim.Adadelta(
        groups, c.base_lr, c.momentum, c.delta, c.weight_decay, foreach=True
    ),
    "rmsprop": lambda groups, c: optim.RMSprop(
        groups, c.base_lr, c.rms_decay, c.delta, c.weight_decay, foreach=True
    ),
    "adam": _adam,
    "adamw": lambda groups, c: optim.AdamW(
        groups, c.base_lr, (c.momentum, c.momentum2), c.delta, c.weight_decay, foreach=True
    ),
    "lars": lambda groups, c: Lars(
        groups,
        {"lr": c.base_lr, "momentum": c.momentum, "weight_decay": c.weight_decay, "trust": c.trust},
    ),
    "lamb": lambda groups, c: Lamb(groups, _of_adam(c)),
}


MOMENTUM_FORMS = ("torch", "caffe")


def make_optimizer(
    named: Mapping[str, nn.Parameter],
    config: SolverConfig,
    delayed: int = 0,
    runs: Mapping[str, nn.Parameter] | None = None,
    called: Callable[[str], str] = str,
    norms: Norms = own_norms,
) -> optim.Optimizer:
    """Make the solver's optimizer, always in torch's `foreach` form, because the form decides bits.

    `delayed` is the number of updates over which Nesterov's momentum is delayed; 0: none. `runs`
    are runs of elements of parameters, updated instead of the parameters. `called` returns the
    name that patterns match. `norms` are of whole tensors. Raises: RecipeError, OwnCodeError.
    """
    groups = groups_of(named, config, called)
    if runs is not None:
        groups = _with_runs(groups, named, runs)
    if delayed:
        settings = {"lr": config.base_lr, "momentum": config.momentum, "every": delayed}
        return DelayedNesterov(groups, settings)
    if is_reference(config.type):
        return make_own(groups, config)
    if config.decay_form != "l2":
        groups = [
            {**group, "weight_decay": 0.0, "decay": group["weight_decay"]} for group in groups
        ]
    optimizer = SOLVERS[config.type](groups, config)
    if config.decay_form != "l2":
        optimizer.register_step_pre_hook(DECAY_HOOKS[config.decay_form])
    if isinstance(optimizer, LayerRates):
        optimizer.take_norms(norms)
    return optimizer


def _with_runs(
    groups: Groups, named: Mapping[str, nn.Parameter], runs: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    run_of = {named[name]: run for name, run in runs.items()}
    return [  # keeps empty groups, because an optimizer needs one
        {
            **group,
            "params": [run_of[parameter] for parameter in group["params"] if parameter in run_of],
        }
        for group in groups
    ]


@torch.no_grad()
def _decay(optimizer: optim.Optimizer, *_args: object) -> None:
    # w = w - rate decay w, for the weights that are about to be updated. Source: Loshchilov and
    # Hutter 2019, algorithm 1, with the rate as the multiplier of the schedule, as in torch's
    # AdamW.
    for group, weights, _ in trained(optimizer):
        if group["decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["decay"])


@torch.no_grad()
def _add_signs(optimizer: optim.Optimizer, *_: object) -> None:
    # The slope of an L1 penalty: g = g + decay sign(w). Source: `SGDSolver::Regularize` in BVLC
    # Caffe.
    for group, weights, gradients in trained(optimizer):
        if group["decay"]:
            torch._foreach_add_(gradients, torch._foreach_sign(weights), alpha=group["decay"])


DECAY_HOOKS = {"decoupled": _decay, "l1": _add_signs}


def groups_of(
    named: Mapping[str, nn.Parameter], config: SolverConfig, called: Callable[[str], str] = str
) -> list[dict[str, Any]]:
    """Group parameters with equal multipliers. Raises: RecipeError if a pattern matches none."""
    for word in ("lr_mult", "decay_mult"):
        for pattern in getattr(config, word):
            if not any(
                _matches(pattern, called(name), parameter) for name, parameter in named.items()
            ):
                raise RecipeError(
                    f"solver.{word} has {pattern!r}, which no parameter of the network matches; "
                    f"they are called {', '.join(list(named)[:4])} …"
                )
    by_factors: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        factors = (
            _multiplier(config.lr_mult, called(name), parameter),
            _multiplier(config.decay_mult, called(name), parameter),
        )
        by_factors.setdefault(factors, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay * decay_factor,
            "rate_factor": rate_factor,
        }
        for (rate_factor, decay_factor), parameters in by_factors.items()
    ]


def set_rate(optimizer: optim.Optimizer, rate: float, momentum: float | None = None) -> None:
    """Set the next update's rate, before each group's multiplier, and its momentum or beta 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)
        if momentum is None:
            continue
        if "betas" in group:
            group["betas"] = (momentum, group["betas"][1])
        else:
            group["momentum"] = momentum


VECTOR_PATTERN = "@vector"
"""The pattern for parameters of one dimension, which are biases and normalization."""


def _matches(pattern: str, name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 if pattern == VECTOR_PATTERN else fnmatchcase(name, pattern)


def _multiplier(patterns: Mapping[str, float], name: str, parameter: nn.Parameter) -> float:
    # If several patterns match, the last one counts.
    values = [value for pattern, value in patterns.items() if _matches(pattern, name, parameter)]
    return values[-1] if values else 1.0


LIMITS = {
    **dict.fromkeys(("base_lr", "weight_decay", "clip_gradients", "delta"), NOT_NEGATIVE),
    **dict.fromkeys(("warmup_steps", "trust"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "momentum2", "rms_decay", "base_momentum"), BELOW_1),
}


def check_solver(config: SolverConfig) -> None:
    """Check the section. Raises: RecipeError if the solver is unknown or a number impossible."""
    if not is_reference(config.type):
        own = ", or an optimizer of your own, package.module:Class"
        check_choice("solver.type", config.type, SOLVERS, own)
    if config.momentum_form not in MOMENTUM_FORMS:
        raise RecipeError(
            f"solver.momentum_form is {config.momentum_form!r}; it must be one of "
            f"{', '.join(MOMENTUM_FORMS)}"
        )
    for word in ("lr_mult", "decay_mult"):
        for pattern, value in getattr(config, word).items():
            if not 0 <= value < float("inf"):
                raise RecipeError(f"solver.{word} {pattern!r} is {value}; it must be 0 or more")
    check_limits("solver", config, LIMITS)
