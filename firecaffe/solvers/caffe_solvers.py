"""Optimizers by Caffe's formulas: SGD, Nesterov and Adam.

m = b1 m + (1 - b1) g          w = w - rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + delta)
    v = b2 v + (1 - b2) g^2

The paper's form, which torch has, corrects v before it takes the root. Compared with it, delta is
divided by sqrt(1 - b2^t) here, so that it starts 32 times as large at b2 = 0.999. Source:
`AdamSolver` in BVLC Caffe; Kingma and Ba 2015, the end of section 2.

h = momentum h + rate (gradient + decay w)        w = w - h
    nesterov:  w = w - ((1 + momentum) h - momentum h_before)

torch's SGD keeps the rate outside, so a lower rate at once also shortens what was collected at a
higher one. Momentum correction first multiplies h by the new rate over the previous one. Then the
two forms are equal except for rounding. Source: `SGDSolver` and `NesterovSolver` in BVLC Caffe; the
correction: Goyal et al. 2017, section 3.
"""

import math
from typing import Any

import torch
from torch import Tensor

from firecaffe.solvers.grouped import GroupedOptimizer, Groups, counted, moments


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
        if "history" not in state:
            state["history"] = torch.zeros_like(weight)
        history: Tensor = state["history"]
        if self.correction:
            before = state.get("rate", rate)
            if before not in (rate, 0.0):
                history.mul_(rate / before)
            state["rate"] = rate
        return history
