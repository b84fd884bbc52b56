"""The moving average of the weights that a training may keep beside them, and evaluate.

    average = weights                                       after the first update
    average = average + (1 - decay) (weights - average)     after each later one

Of replicas that train by themselves there are common weights after an average alone: one that comes
after k steps counts as much as k updates that all came to them, 1 - decay^k.

It is a pure function of the weights after each step, so workers change no bit of it. Buffers
(BatchNorm's statistics) are not averaged: with the average go those of the training, which are
means over steps already.

Source: Polyak and Juditsky 1992; as torch.optim.swa_utils has it (`get_ema_multi_avg_fn`, buffers
kept in sync).
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from firecaffe.training.weights import Weights

WARMUP = 10
"""With a warm-up the decay of update t is at most (1 + t) / (WARMUP + t), t counted from 0, so that
the first weights are soon forgotten. Source: TensorFlow's ExponentialMovingAverage (num_updates).
"""


class Ema:
    """The average of a network's trained parameters."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], decay: float, warmup: bool = False
    ) -> None:
        self._weights: dict[str, Tensor] = dict(named)
        self._decay, self._warmup = decay, warmup
        self.average = {name: each.detach().clone() for name, each in named.items()}

    @property
    def piece(self) -> Weights:
        """The average as a piece of the training's state."""
        return Weights(self.average.items)

    def update(self, step: int) -> None:
        """Takes in the weights after step `step`, counted from 0."""
        self.update_after(range(step, step + 1), self._weights)

    @torch.no_grad()
    def update_after(self, steps: range, names: Iterable[str]) -> None:
        """Takes in some of the weights after steps at whose ends nobody had them, but for the last
        one.
        """
        average = [self.average[name] for name in names]
        if not average:  # a stage without weights
            return
        weights = [self._weights[name] for name in names]
        if steps.start == 0:
            torch._foreach_copy_(average, weights)
            return
        torch._foreach_lerp_(average, weights, 1 - prod(map(self._decay_of, steps)))

    def _decay_of(self, step: int) -> float:
        return min(self._decay, (1 + step) / (WARMUP + step)) if self._warmup else self._decay

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the weights' place, for a `with` block: memory is exchanged, nothing
        is copied.
        """
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    def exchange(self) -> None:
        """Puts the average in the weights' place, and the weights in its own."""
        for weight, average in zip(self._weights.values(), self.average.values(), strict=True):
            weight.data, average.data = _data(average), _data(weight)


def _data(tensor: Tensor) -> Tensor:
    return tensor.detach()
