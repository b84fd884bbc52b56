"""Optimizers over lists of weights: SGD, Nesterov, Adam by Caffe's formulas; delayed Nesterov.

Adam:
    m = b1 m + (1 - b1) g          w = w - rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + delta)
    v = b2 v + (1 - b2) g^2

Adam's paper, and torch, correct v before it takes the root. Compared with that, delta is
divided by sqrt(1 - b2^t) here, so that it starts 32 times as large at b2 = 0.999. Source:
`AdamSolver` in BVLC Caffe; Kingma and Ba 2015, the end of section 2.

SGD, and Nesterov:
    h = momentum h + rate (gradient + decay w)        w = w - h
    nesterov:  w = w - ((1 + momentum) h - momentum h_before)

torch's SGD keeps the rate outside, so a lower rate at once also shrinks the momentum that was
collected at a higher rate. Momentum correction first multiplies h by the new rate over the previous
one. Then the two forms are equal except for rounding. Source: `SGDSolver` and `NesterovSolver` in
BVLC Caffe; the correction: Goyal et al. 2017, section 3.

Delayed Nesterov:
    each update     d = d + g;  w = w - rate g
    the N-th        m = β m + d;  w = w - rate (g + β m);  d = 0

At a server that receives gradients late, momentum in each update follows gradients that are N
updates old, which is the usual cause of divergence. Here the updates in between have no momentum.
N updates together are one Nesterov update on the mean of N gradients, at N times the rate. N = 1 is
torch's Nesterov. Source: Liu et al. 2024 (docs/explanation/synchrony.md), algorithm 3 with c = 0.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, optim

Groups = Iterable[dict[str, Any]] | Iterable[Tensor]


def trained(
    optimizer: optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    """Yield each group that has gradients, its weights that have one, and these gradients."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if weights:
            yield group, weights, [weight.grad for weight in weights]


class GroupedOptimizer(optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group, weights, gradients in trained(self):
            self.update(group, weights, gradients)

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


class CaffeAdam(GroupedOptimizer):
    """Adam in Caffe's form. The weight decay is part of the gradient."""

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

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        if group["weight_decay"]:
            added = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            gradients = list(added)
        states = [self.state[weight] for weight in weights]
        means, squares = moments(states, gradients, group["betas"])
        steps = [counted(state) for state in states]
        moved = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(moved, group["delta"])
        rates = [-group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
        torch._foreach_addcdiv_(weights, means, moved, rates)


class CaffeSGD(GroupedOptimizer):
    """SGD in Caffe's form. `nesterov` and `correction` hold for all groups."""

    def __init__(
        self,
        params: Groups,
        lr: float,
        momentum: float,
        weight_decay: float,
        nesterov: bool = False,
        correction: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.nesterov, self.correction = nesterov, correction

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        moved = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(moved, rate)
        histories = [self._history(weight, rate) for weight in weights]
        before: list[Tensor] = []
        if self.nesterov:
            before = list(torch._foreach_mul(histories, momentum))
        torch._foreach_mul_(histories, momentum)
        torch._foreach_add_(histories, moved)
        if self.nesterov:
            ahead = torch._foreach_mul(histories, 1 + momentum)
            torch._foreach_sub_(ahead, before)
            torch._foreach_sub_(weights, ahead)
        else:
            torch._foreach_sub_(weights, histories)

    def _history(self, weight: Tensor, rate: float) -> Tensor:
        state = self.state[weight]
        history = kept(state, "history", weight)
        if self.correction:
            before = state.get("rate", rate)
            if before not in (rate, 0.0):
                history.mul_(rate / before)
            state["rate"] = rate
        return history


class DelayedNesterov(GroupedOptimizer):
    """SGD with delayed Nesterov momentum. `every` is N; the rate is that of one gradient."""

    def __init__(self, params: Groups, lr: float, momentum: float, every: int) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            moved = gradient
            if group["weight_decay"]:
                moved = moved.add(weight, alpha=group["weight_decay"])
            state = self.state[weight]
            momentum = kept(state, "momentum_buffer", weight)
            delayed = kept(state, "delayed", weight)
            state["updates"] = state.get("updates", 0) + 1
            delayed.add_(moved)
            if state["updates"] >= group["every"]:
                momentum.mul_(group["momentum"]).add_(delayed)
                moved = moved.add(momentum, alpha=group["momentum"])
                delayed.zero_()
                state["updates"] = 0
            weight.add_(moved, alpha=-group["lr"])


def set_delay(optimizer: optim.Optimizer, every: int) -> None:
    for group in optimizer.param_groups:
        if "every" in group:
            group["every"] = every
