"""An optimizer whose update is that of a list of weights, in operations over all of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

Groups = Iterable[dict[str, Any]] | Iterable[Tensor]


class GroupedOptimizer(optim.Optimizer):
    """Steps group by group, with those weights of a group that have a gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if weights:
                self.update(group, weights, [each.grad for each in weights])

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates the weights in place. group: what the group was given, as "lr"."""
        raise NotImplementedError


State = dict[str, Any]
"""What an optimizer keeps of one weight."""


def kept(state: State, name: str, like: Tensor) -> Tensor:
    """What is kept under a name: zeros before the first update."""
    if name not in state:
        state[name] = torch.zeros_like(like)
    value: Tensor = state[name]
    return value


def counted(state: State) -> int:
    """The number of this update, from 1."""
    state["step"] = state.get("step", 0) + 1
    return int(state["step"])


def moments(
    states: Sequence[State], gradients: list[Tensor], betas: tuple[float, float]
) -> tuple[list[Tensor], list[Tensor]]:
    """The moving means of the gradients and of their squares, with these. Source: Kingma and Ba
    2015, algorithm 1.
    """
    beta1, beta2 = betas
    pairs = list(zip(states, gradients, strict=True))
    means = [kept(state, "mean", each) for state, each in pairs]
    squares = [kept(state, "square", each) for state, each in pairs]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    return means, squares
