"""Caffe's SGD, which keeps the learning rate inside the momentum buffer h.

    h = momentum h + rate (gradient + decay w)        w = w - h
    nesterov:  w = w - ((1 + momentum) h - momentum h_before)

torch's SGD keeps the rate outside, so a lower rate at once also shortens what was collected at a
higher one. Momentum correction first multiplies h by the new rate over the previous one. Then the
two forms are equal except for rounding. Source: `SGDSolver` and `NesterovSolver` in BVLC Caffe; the
correction: Goyal et al. 2017, section 3.
"""

from typing import Any

import torch
from torch import Tensor

from firecaffe.solvers.grouped import GroupedOptimizer, Groups


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
        histories = [self._history(each, rate) for each in weights]
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
