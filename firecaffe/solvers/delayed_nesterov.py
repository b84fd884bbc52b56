"""Momentum at a server that gradients reach late: once in N updates, on the mean of all N.

    each update     d = d + g;  w = w - rate g
    the N-th        m = β m + d;  w = w - rate (g + β m);  d = 0

Momentum in each update goes on in the direction of gradients that are N updates old, which is the
usual cause of divergence. Here the updates between are plain, and N of them together are one of
Nesterov's, at N times the rate, on the mean of N gradients. With N = 1 it is torch's own.

Source: Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (algorithm 3, c =
0).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import optim


class DelayedNesterov(optim.Optimizer):
    """The rate is that of one gradient."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, momentum: float, every: int
    ) -> None:
        """every: N."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                if group["weight_decay"]:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                    state["delayed"] = torch.zeros_like(parameter)
                    state["updates"] = 0
                state["updates"] += 1
                state["delayed"].add_(gradient)
                if state["updates"] >= group["every"]:
                    momentum = state["momentum_buffer"]
                    momentum.mul_(group["momentum"]).add_(state["delayed"])
                    gradient = gradient.add(momentum, alpha=group["momentum"])
                    state["delayed"].zero_()
                    state["updates"] = 0
                parameter.add_(gradient, alpha=-group["lr"])


def set_delay(optimizer: optim.Optimizer, every: int) -> None:
    """Sets N, if the optimizer delays its momentum."""
    for group in optimizer.param_groups:
        if "every" in group:
            group["every"] = every
