"""Optimizers of the user's own, which `solver.type` names as package.module:Class.

They are made as torch's are, by Class(groups, lr=…, **solver.args). The policy writes the rate into
the groups before each step. A checkpoint holds only state that is stored where torch's optimizers
store it: tensors and numbers by parameter, numbers in the groups.
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, optim

from firecaffe.errors import RecipeError
from firecaffe.solvers.config import SolverConfig
from firecaffe.user_code import call, find, shown

OF_THE_RECIPE = {"lr": "solver.base_lr", "weight_decay": "solver.weight_decay"}

NUMBERS = (int, float, str, type(None))
"""The types that a checkpoint holds besides tensors; True and False are int."""


def make_own(groups: Sequence[dict[str, Any]], config: SolverConfig) -> optim.Optimizer:
    """Make a user's optimizer. Raises: RecipeError if it cannot step or be saved; OwnCodeError."""
    made = find("solver.type", config.type)
    for name, word in OF_THE_RECIPE.items():
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

    def check_once(*_: object) -> None:
        if optimizer.state:  # not right after the first step, which a subclass may extend
            handle.remove()
            check_kept(optimizer, config.type)

    handle = optimizer.register_step_pre_hook(check_once)
    return optimizer


def check_kept(optimizer: optim.Optimizer, name: str) -> None:
    """Check an optimizer's state. Raises: RecipeError if a checkpoint would not hold all of it."""
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
    if wrong:
        raise RecipeError(
            f"solver.type {name!r} keeps {wrong[0]}, which a checkpoint does not hold; it holds "
            "tensors and numbers in state[parameter], and numbers in the groups"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_number, value))
    return isinstance(value, NUMBERS)
