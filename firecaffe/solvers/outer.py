"""Outer optimizers: what an average does to the weights x that the replicas began with.

D is x minus the mean of the replicas' weights: the *outer gradient*. With a, the learning rate:

    average     x = x - D                                      the replicas' mean
    slowmo      u = b u + D / a;  x = x - r a u                0 < r, the outer rate, and b, its
    nesterov    u = b u + D;      x = x - r (D + b u)          momentum

Both become `average` with r = 1 and b = 0. All are torch's SGD on D.

Source: Wang et al. 2020, "SlowMo: improving communication-efficient distributed SGD with slow
momentum", algorithm 1; Douillard et al. 2023, "DiLoCo: distributed low-communication training of
language models" (r = 0.7, b = 0.9).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn, optim

USUAL = {"average": (1.0, 0.0), "slowmo": (1.0, 0.5), "nesterov": (0.7, 0.9)}
"""The outer optimizers, with the rate and the momentum that each has if none is said."""


class Outer:
    """Updates weights whose `grad` is the outer gradient. Its momentum is `optimizer`'s state."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        kind: str,
        rate: float | None = None,
        momentum: float | None = None,
    ) -> None:
        """kind: one of USUAL. rate, momentum: None for its usual one. `average` has no other."""
        usual_rate, usual_momentum = USUAL[kind]
        if kind == "average":
            rate = momentum = None
        self._rate = usual_rate if rate is None else rate
        momentum = usual_momentum if momentum is None else momentum
        self._is_slowmo = kind == "slowmo"
        self._parameters = list(parameters)
        nesterov = kind == "nesterov" and momentum > 0
        self.optimizer = optim.SGD(
            self._parameters, self._rate, momentum, nesterov=nesterov, foreach=True
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates the weights. learning_rate: the present one of the replicas."""
        trained: list[Tensor] = [each for each in self._parameters if each.grad is not None]
        if self._is_slowmo and trained:
            gradients = [each.grad for each in trained if each.grad is not None]
            if learning_rate == 0:  # a momentum per rate has no value
                torch._foreach_sub_(trained, gradients)
                return
            torch._foreach_div_(gradients, learning_rate)
            self.optimizer.param_groups[0]["lr"] = self._rate * learning_rate
        self.optimizer.step()
