"""The outcome of a step: queued with the step, read when the device has got there."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from firecaffe.errors import NotFiniteError
from firecaffe.training.times import Timings
from firecaffe.training.updates.update import Found

LOOK_S = 0.001
"""Seconds between two looks whether a device has got to a mark."""

VOTES = 2
"""The number of votes: to stop, and to save."""


@dataclass(frozen=True)
class Votes:
    """What a rank wants done after a step. One vote is enough. All ranks know the votes: they are
    summed with the gradients, so they cost no message of their own.
    """

    stop: bool = False
    save: bool = False


def ballot(votes: Votes, device: torch.device) -> Tensor:
    """A rank's votes, as they are counted with those of the others."""
    found = torch.zeros(VOTES, device=device)
    for place, is_wanted in enumerate((votes.stop, votes.save)):
        if is_wanted:
            found[place].fill_(1.0)  # by the device: a copy from here would wait for it
    return found


@dataclass(frozen=True)
class StepResult:
    """The result of one step over all workers."""

    samples: int
    loss: float
    metrics: dict[str, float]
    """Means over the step's samples, by name."""
    timings: Timings
    votes: Votes = Votes()


class Times(Protocol):
    """The times of a step."""

    def is_over(self) -> bool: ...
    def read(self, step: int) -> Timings: ...


@dataclass(frozen=True)
class Outcome:
    """A step that is queued, and the host memory that its numbers will be in."""

    step: int
    samples: int
    weight: float
    """The number of full micro-batches over which the loss is the mean."""
    metrics: Sequence[str]
    found: Found
    """What its sums are like. They are the loss, the metrics, and the votes."""
    times: Times

    @property
    def loss(self) -> float:
        return float(self.found.sums[0]) / self.weight

    def check_finite(self) -> None:
        """Looks at the sums over all ranks, so that all decide alike. Raises: NotFiniteError."""
        problem = self.problem
        if problem:
            error = NotFiniteError(problem)
            error.step = self.step + 1
            raise error

    @property
    def problem(self) -> str:
        """What is not finite; empty if all is."""
        loss, found = self.loss, self.found
        if math.isfinite(loss) and found.may_overflow:
            return ""
        if not bool(found.is_finite.all()):
            layer = found.names[found.is_finite.tolist().index(False)]
            return (
                f"the loss is {loss:.4g}; the first gradient in network order that is not finite "
                f"is that of {layer}"
            )
        if not math.isfinite(loss):
            return f"the loss is {loss:.4g}, though all gradients are finite"
        return "" if bool(found.norm.isfinite()) else "the norm of the gradient is beyond float32"

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Waits for the step's end. look: called meanwhile; it may raise.

        Raises: NotFiniteError.
        """
        while not self.times.is_over():
            look()
            time.sleep(LOOK_S)
        self.check_finite()
        _, *counts, stop, save = self.found.sums.tolist()
        shares = (count / self.samples for count in counts)
        metrics = dict(zip(self.metrics, shares, strict=True))
        votes = Votes(stop > 0, save > 0)
        return StepResult(self.samples, self.loss, metrics, self.times.read(self.step), votes)
