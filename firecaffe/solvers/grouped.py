"""The base of optimizers that update a list of weights in operations over the whole list."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

Groups = Iterable[dict[str, Any]] | Iterable[Tensor]


class GroupedOptimizer(optim.Optimizer):
    """An optimizer that steps group by group, with the weights of a group that have a gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self.update(group, weights, [weight.grad for weight in weights])

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the weights in place. `group` holds the group's settings, as "lr"."""
        raise NotImplementedError


State = dict[str, Any]


def kept(state: State, name: str, like: Tensor) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(like)
    value: Tensor = state[name]
    return value


def counted(state: State) -> int:
    state["step"] = state.get("step", 0) + 1
    return int(state["step"])


def moments(
    states: Sequence[State], gradients: list[Tensor], betas: tuple[float, float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Update the means of gradients and of their squares (Kingma and Ba 2015, algorithm 1)."""
    beta1, beta2 = betas
    pairs = list(zip(states, gradients, strict=True))
    means = [kept(state, "mean", gradient) for state, gradient in pairs]
    squares = [kept(state, "square", gradient) for state, gradient in pairs]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    return means, squares
