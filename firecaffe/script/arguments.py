"""What a script gives to the functions for its own loop: is each of the kind that it must be?

Looked at before any world is joined, for that would stay; each mistake is one line.
"""

from typing import Any

import torch.distributed as dist
from torch import nn, optim
from torch.distributed import ProcessGroup

from firecaffe.reference import shown
from firecaffe.script.words import ArgumentError

SUMMING = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
"""Classes of networks that sum their gradients themselves. Their modules are mostly not loaded."""


def check_network(function: str, word: str, value: Any) -> None:
    """Raises: ArgumentError if a value is no network."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, type) and issubclass(value, nn.Module):
        name = value.__name__
        found = f"the class {name}; expected a network that is made of it, as {name}(…)"
    elif isinstance(value, list | tuple):
        found = f"{shown(value)}; expected one network (of several, call {function} for each)"
    elif callable(value):
        found = f"{shown(value)}; expected a network, a torch.nn.Module, not what makes it"
    else:
        found = f"{shown(value)}; expected a network, a torch.nn.Module"
    raise ArgumentError(f"{function}: {word} is {found}")


def check_sums_nothing(function: str, word: str, network: nn.Module, instead: str) -> None:
    """Raises: ArgumentError if a network, or one within it, sums its gradients over ranks itself,
    so that all would go over the wire twice. instead: what to do.
    """
    for name, part in network.named_modules():
        found = [each.__name__ for each in type(part).__mro__ if each.__name__ in SUMMING]
        if found:
            place = f"{word}.{name} is" if name else f"{word} is"
            raise ArgumentError(
                f"{function}: {place} in {found[0]} already, which sums its gradients itself; "
                f"{instead}"
            )


def check_optimizer(function: str, value: Any, network: nn.Module) -> None:
    """Raises: ArgumentError if a value is no optimizer, or is one of other networks."""
    if isinstance(value, type) and issubclass(value, optim.Optimizer):
        name = value.__name__
        raise ArgumentError(
            f"{function}: optimizer is the class {name}; expected one that is made of it, as "
            f"{name}(model.parameters(), …)"
        )
    if not isinstance(value, optim.Optimizer):
        raise ArgumentError(
            f"{function}: optimizer is {shown(value)}; expected a torch.optim.Optimizer"
        )
    if not hasattr(value, "_optimizer_step_post_hooks"):
        raise ArgumentError(
            f"{function}: optimizer is a wrapper ({type(value).__name__}), which has no hooks of "
            "its own; give the optimizer inside it (of accelerate, optimizer.optimizer)"
        )
    own = {id(each) for each in network.parameters()}
    if not any(id(each) in own for group in value.param_groups for each in group["params"]):
        raise ArgumentError(
            f"{function}: optimizer has none of the model's parameters; make it of "
            "model.parameters(), after all that changes them (split, to, a wrapper)"
        )


def check_group(function: str, value: Any) -> None:
    """Raises: ArgumentError if a value is no process group of this rank."""
    if value is None or isinstance(value, ProcessGroup):
        return
    if value == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            f"{function}: this rank is not in process_group; only the ranks of a group call it"
        )
    raise ArgumentError(
        f"{function}: process_group is {shown(value)}; expected a group, as "
        "torch.distributed.new_group([0, 1]) makes it"
    )


def check_whole_number(function: str, word: str, value: Any, least: int) -> None:
    """Raises: ArgumentError."""
    if type(value) is not int or value < least:
        raise ArgumentError(
            f"{function}: {word} is {shown(value)}; it must be a whole number, at least {least}"
        )


def check_number(function: str, word: str, value: Any) -> None:
    """Raises: ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{function}: {word} is {shown(value)}; it must be a number")
