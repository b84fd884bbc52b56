"""The outcome of a step: queued with the step, read when the device has got there."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from firecaffe.errors import NotFiniteError
from firecaffe.gradients.totals import Totals
from firecaffe.transport.queue import Mark

LOOK_S = 0.001
"""Seconds between two looks whether a device has got to a mark."""


@dataclass(frozen=True)
class Timings:
    """The seconds of one step, counted from 1, on one rank, by what they went to."""

    step: int
    data_s: float
    compute_s: float
    exposed_communication_s: float
    exchange_s: float
    update_s: float
    step_s: float
    micro_batches: int
    """The number of micro-batches that the rank has computed."""
    idle_s: float | None = None
    """Of a network in stages: the part of exposed_communication_s in which this rank's stage waited
    for others."""
    stage: int | None = None
    """Of a network in stages: this rank's, counted from 0."""
    by_rank: dict[int, tuple[int, float]] | None = None
    """In a mode with a server, which alone knows steps: the micro-batches of each rank that count
    in this one, and the seconds that it took to fetch and compute them."""
    activations_s: float | None = None
    """Of a split network: what of exposed_communication_s the exchanges between its layers took.
    By `rows` the sums of weights' gradients are among them. The rest went to other gradients."""


@dataclass(frozen=True)
class Votes:
    """What a rank wants done after a step. One vote is enough. All ranks know the votes: they are
    summed with the gradients, so they cost no message of their own.
    """

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepResult:
    """The result of one step over all workers."""

    samples: int
    loss: float
    metrics: dict[str, float]
    """Means over the step's samples, by name."""
    timings: Timings
    votes: Votes = Votes()


@dataclass(frozen=True)
class Outcome:
    """A step that is queued, and the host memory that its numbers will be in."""

    step: int
    samples: int
    weight: float
    """The number of full micro-batches over which the loss is the mean."""
    metrics: Sequence[str]
    sums: Tensor
    """The loss, the metrics, and the votes to stop and to save."""
    is_finite: Tensor
    """Whether each parameter's gradient is finite: bool, shape (parameters,)."""
    norm: Tensor
    """The gradient's norm, if it is clipped; else 0."""
    names: Sequence[str]
    """The parameters' names."""
    overflows: bool
    """Whether gradients may overflow: the loss scale mends that."""
    totals: Totals
    start: Mark
    end: Mark
    waits: Sequence[tuple[Mark, Mark]]
    """Marks before and after each wait for data. A device that works behind does not wait while it
    has work."""
    micro_batches: int
    """The number of this rank's."""

    @property
    def loss(self) -> float:
        return float(self.sums[0]) / self.weight

    def check_finite(self) -> None:
        """Looks at the sums over all ranks, so that all decide alike. Raises: NotFiniteError."""
        raise_not_finite(self.problem, self.step)

    @property
    def problem(self) -> str:
        """What is not finite; empty if all is."""
        loss = self.loss
        if math.isfinite(loss) and self.overflows:
            return ""
        if not bool(self.is_finite.all()):
            layer = self.names[self.is_finite.tolist().index(False)]
            return (
                f"the loss is {loss:.4g}; the first gradient in network order that is not finite "
                f"is that of {layer}"
            )
        if not math.isfinite(loss):
            return f"the loss is {loss:.4g}, though all gradients are finite"
        return "" if bool(self.norm.isfinite()) else "the norm of the gradient is beyond float32"

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Waits for its end. look: called meanwhile; it may raise."""
        while not self.end.is_over():
            look()
            time.sleep(LOOK_S)

    def read(self, look: Callable[[], None] = lambda: None) -> StepResult:
        """Waits for the step's end. look: called meanwhile; it may raise.

        Raises: NotFiniteError.
        """
        self.wait(look)
        self.check_finite()
        _, *counts, stop, save = self.sums.tolist()
        shares = (count / self.samples for count in counts)
        metrics = dict(zip(self.metrics, shares, strict=True))
        votes = Votes(stop > 0, save > 0)
        return StepResult(self.samples, self.loss, metrics, self._timings(), votes)

    def _timings(self) -> Timings:
        totals = self.totals
        data_s = sum(end.seconds_after(begin) for begin, end in self.waits)
        return Timings(
            step=self.step + 1,
            data_s=data_s,
            compute_s=totals.computed.seconds_after(self.start) - data_s,
            exposed_communication_s=totals.exposed_s,
            exchange_s=totals.exchange_s,
            update_s=self.end.seconds_after(totals.summed),
            step_s=self.end.seconds_after(self.start),
            micro_batches=self.micro_batches,
        )


def raise_not_finite(problem: str, step: int) -> None:
    """Raises: NotFiniteError of a step, counted from 0, if there is a problem."""
    if problem:
        error = NotFiniteError(problem)
        error.step = step + 1
        raise error
