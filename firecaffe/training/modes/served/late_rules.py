"""Rules that correct late gradients. They leave a gradient of staleness 0 as it is."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from firecaffe.training.modes.served.server_memory import ServerMemory

LAMBDA = 2.0
"""The weight of delay compensation. Source: Zheng et al. 2017, as it is for CIFAR-10."""

DECAY = 0.95
"""The decay of the gradients' mean square in delay compensation. Source: Zheng et al. 2017."""

SQUARE = 1e-7
"""The number added to the mean square in delay compensation. Source: Zheng et al. 2017."""

STEP_DECAY = 0.999
"""The decay of the mean step, in the gap-aware rule; corrected for the mean's start at 0."""

Weights = Mapping[str, Tensor]
"""Weights or gradients of parameters by name, in network order."""


def staleness_scale(form: str, staleness: int) -> float:
    """Return the factor of a gradient: 1, or 1 / τ.

    Source: Zhang et al. 2016, "Staleness-aware async-SGD for distributed deep learning".
    """
    return 1 / max(staleness, 1) if form == "inverse" else 1.0


class MeanStep:
    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    @property
    def value(self) -> float:
        return self._sum / (1 - STEP_DECAY**self._count) if self._count else 0.0

    def add(self, step: float) -> None:
        self._sum = STEP_DECAY * self._sum + (1 - STEP_DECAY) * step
        self._count += 1

    def state_dict(self) -> dict[str, float]:
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._sum, self._count = state["sum"], int(state["count"])


class LateRule:
    """Corrects nothing. Others extend it."""

    def __init__(self) -> None:
        self.mean_step = MeanStep()
        """The mean of updates. Only the gap-aware rule adds to it; a checkpoint always has it."""

    def correct(self, gradients: Weights, weights: Weights, pulled: Weights) -> None:
        """Correct a work's gradients in place, given the weights now and those it pulled."""

    @contextmanager
    def around_update(self, weights: Weights) -> Iterator[None]:
        """Learn from an update, which the block makes."""
        yield


class DelayCompensation(LateRule):
    """DC-ASGD-a: g + λ g ⊙ g ⊙ (W - W pulled), λ = λ0 / √(mean of g ⊙ g).

    The mean square takes this gradient in first. Source: Zheng et al. 2017, "Asynchronous
    stochastic gradient descent with delay compensation".
    """

    def __init__(self, mean_square: Weights) -> None:
        super().__init__()
        self._mean_square = mean_square

    def correct(self, gradients: Weights, weights: Weights, pulled: Weights) -> None:
        for name, g in gradients.items():
            square = self._mean_square[name]
            square.mul_(DECAY).addcmul_(g, g, value=1 - DECAY)
            moved = weights[name] - pulled[name]
            g.add_(g * g * moved * (LAMBDA / (square + SQUARE).sqrt()))


class GapAware(LateRule):
    """g / (1 + gap / mean step), both as root mean squares over all weights.

    Source: Barkai, Hakimi and Schuster 2020, "Gap-aware mitigation of gradient staleness".
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        of_all: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
    ) -> None:
        """Correct where some parameters are.

        sizes: the elements of each parameter of the network. of_all: maps numbers of the
        parameters that are here to those of all, in network order.
        """
        super().__init__()
        self._sizes, self._of_all = sizes, of_all

    def correct(self, gradients: Weights, weights: Weights, pulled: Weights) -> None:
        if self.mean_step.value > 0:
            gap = self._distance({name: weights[name] for name in gradients}, pulled)
            if gradients:  # all of the work's may be elsewhere
                torch._foreach_div_(list(gradients.values()), 1 + gap / self.mean_step.value)

    @contextmanager
    def around_update(self, weights: Weights) -> Iterator[None]:
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        yield
        self.mean_step.add(self._distance(weights, before))

    def _distance(self, weights: Weights, others: Weights) -> float:
        """Return ‖W - W'‖ / √k of k weights."""
        squares = self._of_all(
            {name: _square(weight, others[name]) for name, weight in weights.items()}
        )
        return math.sqrt(sum(squares.values()) / sum(self._sizes[name] for name in squares))


def _square(weight: Tensor, other: Tensor) -> float:
    # In the weight's memory layout, on which the bits of a sum depend.
    moved = torch.empty_like(weight).copy_(weight).sub_(other)
    return float(moved.double().square().sum())


def late_rule(
    name: str,
    memory: ServerMemory,
    named: Mapping[str, nn.Parameter],
    of_all: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
) -> LateRule:
    """Make the rule of `synchrony.compensate`. named: all parameters; of_all: as in `GapAware`."""
    if name == "gap":
        return GapAware({name: parameter.numel() for name, parameter in named.items()}, of_all)
    return DelayCompensation(memory.mean_square) if name == "delay" else LateRule()
