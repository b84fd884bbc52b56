"""The outcome of a step: queued with the step, and read when the device has reached it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from firecaffe.errors import NotFiniteError
from firecaffe.training.times import Timings
from firecaffe.training.updates.spread import Found

# seconds between two checks whether a device has reached a mark
LOOK_S = 0.001

VOTES = 2


@dataclass(frozen=True)
class Votes:
    """A rank's wishes after a step. They are summed with the gradients; one vote is enough."""

    stop: bool = False
    save: bool = False


def ballot(votes: Votes, device: torch.device) -> Tensor:
    ballots = torch.zeros(VOTES, device=device)
    for place, is_wanted in enumerate((votes.stop, votes.save)):
        if is_wanted:
            ballots[place].fill_(1.0)  # by the device: a copy from the host would wait for it
    return ballots


@dataclass(frozen=True)
class StepResult:
    samples: int
    loss: float
    metrics: dict[str, float]
    """Means over the step's samples, by name."""
    timings: Timings
    votes: Votes = Votes()
    squares: tuple[float, float] | None = None
    """See `Found.squares`; None if they were not measured."""


class Times(Protocol):
    def is_over(self) -> bool: ...
    def read(self, step: int) -> Timings: ...


@dataclass(frozen=True)
class Outcome:
    """A queued step, and the host memory that will have its numbers."""

    step: int
    samples: int
    weight: float
    """The number of full micro-batches over which the loss is the mean."""
    metrics: Sequence[str]
    checked: Found
    """The sums (loss, metrics, votes), and whether the gradients are finite."""
    times: Times

    @property
    def loss(self) -> float:
        return float(self.checked.sums[0]) / self.weight

    def check_finite(self) -> None:
        """Check the sums over all ranks, so that all decide the same. Raises: NotFiniteError."""
        problem = self.problem
        if problem:
            error = NotFiniteError(problem)
            error.step = self.step + 1
            raise error

    @property
    def problem(self) -> str:
        """A description of what is not finite; empty if all is."""
        loss, checked = self.loss, self.checked
        if math.isfinite(loss) and checked.may_overflow:
            return ""
        if not bool(checked.is_finite.all()):
            layer = checked.names[checked.is_finite.tolist().index(False)]
            return (
                f"the loss is {loss:.4g}; the first gradient in network order that is not finite "
                f"is that of {layer}"
            )
        if not math.isfinite(loss):
            return f"the loss is {loss:.4g}, though all gradients are finite"
        return "" if bool(checked.norm.isfinite()) else "the norm of the gradient is beyond float32"

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Wait for the step's end. look: called meanwhile; it may raise. Raises: NotFiniteError."""
        while not self.times.is_over():
            look()
            time.sleep(LOOK_S)
        self.check_finite()
        _, *counts, stop, save = self.checked.sums.tolist()
        shares = (count / self.samples for count in counts)
        metrics = dict(zip(self.metrics, shares, strict=True))
        votes, timings = Votes(stop > 0, save > 0), self.times.read(self.step)
        squares = None
        if self.checked.squares is not None:
            of_leaves, of_mean = self.checked.squares.tolist()
            squares = of_leaves, of_mean
        return StepResult(self.samples, self.loss, metrics, timings, votes, squares)
