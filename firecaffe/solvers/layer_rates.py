"""LARS and LAMB: optimizers with a learning rate for each layer, for large batches.

The rate of a tensor is scaled by the length of its weights over that of its update, so that no
layer moves by more than a share of itself. Tensors of one dimension (biases, normalization) use the
plain rate, as in all published large-batch recipes. Libraries differ in this, or in the scale.

    LARS:  t = trust |w| / (|g| + decay |w|)     v = momentum v + rate t (g + decay w)     w = w - v
    LAMB:  r = m' / (sqrt(v') + delta) + decay w                   w = w - rate |w| / |r| r

m' and v' are Adam's corrected means. If a length is 0, the scale is 1. Source: You, Gitman and
Ginsburg 2017, arXiv 1708.03888, algorithm 1; You et al. 2020, arXiv 1904.00962, algorithm 2.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from firecaffe.solvers.caffe_solvers import Groups, counted, kept, moments, trained

Norms = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]]
"""(weights, lists like them) -> the scalar L2 norms of each list, always of whole tensors."""


def own_norms(_: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    return [torch._foreach_norm(list(tensors)) if tensors else [] for tensors in lists]


class LayerRates(optim.Optimizer, ABC):
    """An optimizer that asks for all norms at once, so that ranks with parts can exchange them."""

    _norms: Norms = staticmethod(own_norms)

    def take_norms(self, norms: Norms) -> None:
        self._norms = norms

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        updates = [
            (group, weights, self.directions(group, weights, gradients))
            for group, weights, gradients in trained(self)
        ]
        every = [weight for _, weights, _ in updates for weight in weights]
        directions = [direction for _, _, of_group in updates for direction in of_group]
        lengths = zip(*self._norms(every, [every, directions]), strict=True)
        of_weights = dict(zip(every, lengths, strict=True))
        for group, weights, of_group in updates:
            self.update(group, weights, of_group, [of_weights[weight] for weight in weights])

    @abstractmethod
    def directions(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Return the directions in which the weights would move. Their lengths decide the rates."""

    @abstractmethod
    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        directions: list[Tensor],
        lengths: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Update the weights in place. `lengths` are those of each weight and of its direction."""


class Lars(LayerRates):
    def __init__(
        self, params: Groups, lr: float, momentum: float, weight_decay: float, trust: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def directions(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        return gradients

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        directions: list[Tensor],
        lengths: list[tuple[Tensor, Tensor]],
    ) -> None:
        decay = group["weight_decay"]
        moved = torch._foreach_add(directions, weights, alpha=decay)
        rates = [
            group["lr"]
            * _ratio(
                group["trust"] * weight_length,
                direction_length + decay * weight_length,
                weight.ndim,
            )
            for weight, (weight_length, direction_length) in zip(weights, lengths, strict=True)
        ]
        torch._foreach_mul_(moved, rates)
        velocities = [kept(self.state[weight], "velocity", weight) for weight in weights]
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, moved)
        torch._foreach_sub_(weights, velocities)


class Lamb(LayerRates):
    def __init__(
        self,
        params: Groups,
        lr: float,
        betas: tuple[float, float],
        delta: float,
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "delta": delta, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def directions(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        states = [self.state[weight] for weight in weights]
        means, squares = moments(states, gradients, group["betas"])
        steps = [counted(state) for state in states]
        roots = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["delta"])
        updates = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        return list(updates)

    def update(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        directions: list[Tensor],
        lengths: list[tuple[Tensor, Tensor]],
    ) -> None:
        rates = [
            group["lr"] * _ratio(weight_length, direction_length, weight.ndim)
            for weight, (weight_length, direction_length) in zip(weights, lengths, strict=True)
        ]
        torch._foreach_mul_(directions, rates)
        torch._foreach_sub_(weights, directions)


def _ratio(numerator: Tensor, denominator: Tensor, dimensions: int) -> Tensor:
    if dimensions < 2:
        return torch.ones_like(numerator)
    return torch.where(
        (numerator > 0) & (denominator > 0), numerator / denominator, torch.ones_like(numerator)
    )
