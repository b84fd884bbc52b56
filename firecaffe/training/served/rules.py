"""What is done to a gradient that is late, before it is applied: closed rules on lists of tensors.

All of them leave a gradient of staleness 0 as it is.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LAMBDA = 2.0
"""The weight of delay compensation. Source: Zheng et al. 2017, as it is for CIFAR-10."""

DECAY = 0.95
"""Of the mean square of the gradients, in delay compensation. Source: as above."""

SQUARE = 1e-7
"""Added to that mean square. Source: as above."""

STEP_DECAY = 0.999
"""Of the mean step, in the gap-aware rule; corrected for the mean's start at 0."""


def staleness_scale(form: str, staleness: int) -> float:
    """The factor of a gradient: 1, or 1 / τ.

    Source: Zhang et al. 2016, "Staleness-aware async-SGD for distributed deep learning".
    """
    return 1 / max(staleness, 1) if form == "inverse" else 1.0


def compensate_delay(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    pulled: Sequence[Tensor],
    mean_square: Sequence[Tensor],
) -> None:
    """DC-ASGD-a: g + λ g ⊙ g ⊙ (W - W pulled), with λ = λ0 / √(mean of g ⊙ g). In place; the mean
    square takes this gradient in first.

    Source: Zheng et al. 2017, "Asynchronous stochastic gradient descent with delay compensation".
    """
    for g, now, then, square in zip(gradients, weights, pulled, mean_square, strict=True):
        square.mul_(DECAY).addcmul_(g, g, value=1 - DECAY)
        g.add_(g * g * (now - then) * (LAMBDA / (square + SQUARE).sqrt()))


def compensate_gap(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    pulled: Sequence[Tensor],
    mean_step: float,
) -> None:
    """Gap-aware: g / (1 + gap / mean step), both as root mean squares over all weights. In place.

    Source: Barkai, Hakimi and Schuster 2020, "Gap-aware mitigation of gradient staleness".
    """
    if mean_step > 0:
        torch._foreach_div_(list(gradients), 1 + distance(weights, pulled) / mean_step)


def distance(weights: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """‖W - W'‖ / √k of k weights."""
    squares = (
        float((now - then).double().square().sum())
        for now, then in zip(weights, others, strict=True)
    )
    return math.sqrt(sum(squares) / sum(each.numel() for each in weights))


class MeanStep:
    """The mean length of an update. The state is JSON."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    @property
    def value(self) -> float:
        """0 before the first update."""
        return self._sum / (1 - STEP_DECAY**self._count) if self._count else 0.0

    def add(self, step: float) -> None:
        self._sum = STEP_DECAY * self._sum + (1 - STEP_DECAY) * step
        self._count += 1

    def state_dict(self) -> dict[str, float]:
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._sum, self._count = state["sum"], int(state["count"])
