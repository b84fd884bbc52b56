"""Nesterov momentum for late gradients: applied once in N updates, to the mean of all N.

    each update     d = d + g;  w = w - rate g
    the N-th        m = β m + d;  w = w - rate (g + β m);  d = 0

At a server that receives gradients late, momentum in each update follows gradients that are N
updates old, which is the usual cause of divergence. Here the updates between are plain. N of them
together are one Nesterov update on the mean of N gradients, at N times the rate. With N = 1 this is
torch's own. Source: Liu et al. 2024 (docs/explanation/synchrony.md), algorithm 3 with c = 0.
"""

from typing import Any

import torch
from torch import Tensor, optim

from firecaffe.solvers.grouped import GroupedOptimizer, Groups


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
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
                state["delayed"] = torch.zeros_like(weight)
                state["updates"] = 0
            state["updates"] += 1
            state["delayed"].add_(moved)
            if state["updates"] >= group["every"]:
                momentum = state["momentum_buffer"]
                momentum.mul_(group["momentum"]).add_(state["delayed"])
                moved = moved.add(momentum, alpha=group["momentum"])
                state["delayed"].zero_()
                state["updates"] = 0
            weight.add_(moved, alpha=-group["lr"])


def set_delay(optimizer: optim.Optimizer, every: int) -> None:
    for group in optimizer.param_groups:
        if "every" in group:
            group["every"] = every
