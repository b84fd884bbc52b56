"""Outer optimizers, which apply an average of replicas to the weights x that they began with.

The *outer gradient* D is x minus the mean of the replicas' weights. The learning rate is a, the
outer rate r > 0, the outer momentum b. With r = 1 and b = 0, slowmo and nesterov become `average`.
All are torch's SGD on D.

    average     x = x - D                                      the replicas' mean
    slowmo      u = b u + D / a;  x = x - r a u
    nesterov    u = b u + D;      x = x - r (D + b u)

Source: Wang et al. 2020 (SlowMo), algorithm 1; Douillard et al. 2023 (DiLoCo; r = 0.7, b = 0.9).
Their titles are in docs/explanation/synchrony.md.
"""

from collections.abc import Sequence

import torch
from torch import nn, optim

from firecaffe.solvers.update_rules import trained

USUAL = {"average": (1.0, 0.0), "slowmo": (1.0, 0.5), "nesterov": (0.7, 0.9)}
"""The outer optimizers, each with its default rate and momentum."""


class Outer:
    """Updates weights whose `grad` is the outer gradient. `optimizer` holds the momentum."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        kind: str,
        rate: float | None = None,
        momentum: float | None = None,
    ) -> None:
        usual_rate, usual_momentum = USUAL[kind]
        if kind == "average":
            rate = momentum = None
        self._rate = usual_rate if rate is None else rate
        momentum = usual_momentum if momentum is None else momentum
        self._is_slowmo = kind == "slowmo"
        nesterov = kind == "nesterov" and momentum > 0
        self.optimizer = optim.SGD(
            parameters, self._rate, momentum, nesterov=nesterov, foreach=True
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the weights. `learning_rate` is the present one of the replicas."""
        for group, weights, gradients in trained(self.optimizer) if self._is_slowmo else ():
            if learning_rate == 0:  # D / a has no value
                torch._foreach_sub_(weights, gradients)
                return
            torch._foreach_div_(gradients, learning_rate)
            group["lr"] = self._rate * learning_rate
        self.optimizer.step()
