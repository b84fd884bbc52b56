"""Caffe's Adam, which adds delta to the uncorrected root and corrects the start in the rate.

    m = b1 m + (1 - b1) g          w = w - rate sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + delta)
    v = b2 v + (1 - b2) g^2

The paper's form, which torch has, corrects v before it takes the root. Compared with it, delta is
divided by sqrt(1 - b2^t) here, so that it starts 32 times as large at b2 = 0.999. Source:
`AdamSolver` in BVLC Caffe; Kingma and Ba 2015, the end of section 2.
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
        words = {"lr": lr, "betas": betas, "delta": delta, "weight_decay": weight_decay}
        super().__init__(params, words)

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        if group["weight_decay"]:
            added = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
            gradients = list(added)
        states = [self.state[each] for each in weights]
        means, squares = moments(states, gradients, group["betas"])
        steps = [counted(each) for each in states]
        moved = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(moved, group["delta"])
        rates = [-group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step) for step in steps]
        torch._foreach_addcdiv_(weights, means, moved, rates)
