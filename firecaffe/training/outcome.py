"""The outcome of a step, its times and its noise.

An outcome is queued with its step, and read when the device has reached it. So are times, which are
marks in the device's queue.

The gradient noise scale is computed from norms of gradients on some steps, summed with them in the
same tree: every rank has them, and the number of workers changes no bit. A norm reads a gradient
once. Even if it took a fifth of a step, on one step in EVERY it takes 1 % of a training.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Protocol, Self, TypedDict

import torch
from msgspec import Meta
from torch import Tensor

from firecaffe.data import Batch, SampleOrder
from firecaffe.errors import NotFiniteError
from firecaffe.gradients.totals import Totals
from firecaffe.runs.noise_scale import GradientNorms, NoiseScale, noise_scale
from firecaffe.schema import Amount, Count, checked
from firecaffe.training.updates.spread import Found
from firecaffe.transport.queue import Mark, Queue

FetchBatch = Callable[[int], Batch]

Span = tuple[Mark, Mark]


@dataclass(frozen=True)
class Timings:
    """The seconds of step `step`, counted from 1, on one rank, by activity."""

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
    """With stages: the part of exposed_communication_s that this rank's stage waited for others."""
    stage: int | None = None
    """This rank's stage, counted from 0; None without stages."""
    by_rank: dict[int, tuple[int, float]] | None = None
    """With a server, by rank: counted micro-batches, and seconds to fetch and compute them."""
    activations_s: float | None = None
    """The part of exposed_communication_s that exchanges between layers of a split network took.

    With `rows`, it includes the sums of weights' gradients. The rest went to other gradients.
    """
    processor_s: float | None = None
    """On a CPU: the part of compute_s in which this rank's thread ran on a processor."""


@dataclass(frozen=True)
class Spent:
    """Host seconds of exchanges and waits during a rank's computation, totals since the start."""

    layers_s: float | None = None
    """Exchanges between layers, forward and backward; None if no layer is split."""
    idle_s: float | None = None
    """Waits for other stages, forward and backward; None without stages."""
    stage: int | None = None
    parts_s: float = 0.0
    """Exchanges of the gradients of parts of layers, after backward."""

    def with_parts(self, seconds: float) -> Self:
        return replace(self, parts_s=seconds)

    def since(self, earlier: Self) -> Self:
        return replace(
            self,
            layers_s=_difference(self.layers_s, earlier.layers_s),
            idle_s=_difference(self.idle_s, earlier.idle_s),
            parts_s=self.parts_s - earlier.parts_s,
        )


def _difference(now: float | None, earlier: float | None) -> float | None:
    return None if now is None else now - (earlier or 0.0)


class StepMarks:
    def __init__(self, queue: Queue, micro_batches: int, spent: Callable[[], Spent]) -> None:
        """Begin a step. micro_batches: this rank's number. spent: returns the totals so far."""
        self._queue, self._micro_batches, self._spent_by_now = queue, micro_batches, spent
        self._before, self._start = spent(), queue.mark()
        self._waits: list[Span] = []
        self._processor_start_s, self._fetching_s = time.thread_time(), 0.0

    def timed(self, fetch: FetchBatch) -> FetchBatch:
        # A device that runs behind the host does not wait for data while it has work queued.
        def fetch_timed(leaf: int) -> Batch:
            asked, before_s = self._queue.mark(), time.thread_time()
            batch = fetch(leaf)
            self._waits.append((asked, self._queue.mark()))
            self._fetching_s += time.thread_time() - before_s
            return batch

        return fetch_timed

    def set_sums(self, totals: Totals) -> None:
        """Set the sums of the step. The thread has slept, and used no CPU, since its backward."""
        self._totals = totals
        self._processor_s = time.thread_time() - self._processor_start_s - self._fetching_s

    def end(self, exchanges: Sequence[Span] = ()) -> None:
        self.end_mark, self._exchanges = self._queue.mark(), tuple(exchanges)
        self._spent = self._spent_by_now().since(self._before)

    def is_over(self) -> bool:
        return self.end_mark.is_over()

    def read(self, step: int) -> Timings:
        """Return the timings of step `step`, counted from 0, which is over."""
        totals, spent = self._totals, self._spent
        data_s = _seconds(self._waits)
        in_compute_s = (spent.layers_s or 0.0) + (spent.idle_s or 0.0)
        in_update_s = spent.parts_s + _seconds(self._exchanges)
        computed_s = totals.computed.seconds_after(self._start)
        return Timings(
            step=step + 1,
            data_s=data_s,
            compute_s=computed_s - data_s - in_compute_s,
            exposed_communication_s=totals.exposed_s + in_compute_s + in_update_s,
            exchange_s=totals.exchange_s + (spent.layers_s or 0.0) + in_update_s,
            update_s=self.end_mark.seconds_after(totals.summed) - in_update_s,
            step_s=self.end_mark.seconds_after(self._start),
            micro_batches=self._micro_batches,
            idle_s=spent.idle_s,
            stage=spent.stage,
            activations_s=spent.layers_s,
            processor_s=None if self._queue.is_async else self._processor_s,
        )


def _seconds(spans: Sequence[Span]) -> float:
    return sum(end.seconds_after(begin) for begin, end in spans)


# seconds between two checks whether a device has reached a mark
POLL_S = 0.001

VOTES = 2


@dataclass(frozen=True)
class Votes:
    """A rank's requests after a step, summed with the gradients; one vote is enough."""

    stop: bool = False
    save: bool = False


def pack_votes(votes: Votes, device: torch.device) -> Tensor:
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
    """A queued step, and the host memory that will receive its numbers."""

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
            time.sleep(POLL_S)
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


EVERY = 20
"""The fewest steps from one measured step to the next."""

MAX_STEPS = 256
"""The most measured steps of a training."""

MAX_SQUARE = 1e30
"""The largest squared norm that a checkpoint may have."""


class _NoiseRow(TypedDict):
    measured: Annotated[list[tuple[Count, Amount, Amount]], Meta(max_length=100 * MAX_STEPS)]


class NoiseMeter:
    """Measures the gradient noise scale. Checkpoints have its state: JSON, equal on all ranks."""

    def __init__(self, order: SampleOrder, steps: int, has_norms: bool) -> None:
        """Measure `steps` steps, unless ranks lack norms or a step has a single micro-batch."""
        self._order = order
        self._every = max(EVERY, -(-steps // MAX_STEPS))
        self._measures = has_norms and order.num_micro_batches > 1
        self._measured: list[GradientNorms] = []

    def is_due(self, step: int) -> bool:
        """Whether to measure step `step`, counted from 0: never the first, nor a short one."""
        return (
            self._measures
            and step > 0
            and step % self._every == 0
            and self._order.samples_in_step(step) == self._order.global_batch_size
        )

    def add(self, step: int, squares: tuple[float, float] | None) -> dict[str, float]:
        """Add the squares of step `step`, from 1, if any (`Found.squares`); return numbers to show.

        Norms that are not finite are left out: a loss scale was too large.
        """
        if squares is None or not all(square <= MAX_SQUARE for square in squares):
            return {}
        of_leaves, of_mean = squares
        mean = of_leaves / self._order.num_micro_batches
        self._measured.append(GradientNorms(step, mean, of_mean))
        scale = self._scale
        return {} if scale is None else scale.numbers

    @property
    def _scale(self) -> NoiseScale | None:
        return noise_scale(
            self._measured, self._order.micro_batch_size, self._order.global_batch_size
        )

    @property
    def row(self) -> dict[str, Any] | None:
        """The scale as result.json has it."""
        scale = self._scale
        return None if scale is None else asdict(scale)

    def state_dict(self) -> dict[str, Any]:
        return {"measured": self._measured} if self._measured else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._measured = [GradientNorms(*row) for row in checked(state, _NoiseRow)["measured"]]
