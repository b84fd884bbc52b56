"""The times of a step on one rank: marks in its device's queue, read when they are over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from firecaffe.data import Batch
from firecaffe.gradients.totals import Totals
from firecaffe.transport.queue import Mark, Queue

FetchBatch = Callable[[int], Batch]
"""A micro-batch of a step by its number."""

Span = tuple[Mark, Mark]
"""Marks before and after something."""


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
class Spent:
    """Seconds that went to others while a rank computes and updates; they are counted on the host,
    from the training's beginning.
    """

    layers_s: float | None = None
    """Of exchanges between layers, in forward and backward; None if no layer is split."""
    idle_s: float | None = None
    """Of waiting for other stages, likewise; None without stages."""
    stage: int | None = None
    """This rank's stage, counted from 0."""
    parts_s: float = 0.0
    """Of exchanges of the gradients of parts of layers, after backward."""

    def with_parts(self, seconds: float) -> Self:
        """The same, with what exchanges of parts' gradients took."""
        return replace(self, parts_s=seconds)

    def since(self, earlier: Self) -> Self:
        """What was spent since."""
        return replace(
            self,
            layers_s=_difference(self.layers_s, earlier.layers_s),
            idle_s=_difference(self.idle_s, earlier.idle_s),
            parts_s=self.parts_s - earlier.parts_s,
        )


def _difference(now: float | None, earlier: float | None) -> float | None:
    return None if now is None else now - (earlier or 0.0)


class StepMarks:
    """What is noted of a step while it is queued."""

    def __init__(self, queue: Queue, micro_batches: int, spent: Callable[[], Spent]) -> None:
        """Begins the step. micro_batches: the number of this rank's. spent: what was until now."""
        self._queue, self._micro_batches, self._spent_by_now = queue, micro_batches, spent
        self._before, self._start = spent(), queue.mark()
        self._waits: list[Span] = []

    def timed(self, fetch: FetchBatch) -> FetchBatch:
        """The same, with each wait for data noted. A device that works behind does not wait while
        it has work.
        """

        def fetch_timed(leaf: int) -> Batch:
            asked = self._queue.mark()
            batch = fetch(leaf)
            self._waits.append((asked, self._queue.mark()))
            return batch

        return fetch_timed

    def sums_are_there(self, totals: Totals) -> None:
        """Takes what the last exchange of gradients has noted."""
        self._totals = totals

    def end(self, exchanges: Sequence[Span] = ()) -> None:
        """Ends the step. exchanges: those of the update."""
        self.end_mark, self._exchanges = self._queue.mark(), tuple(exchanges)
        self._spent = self._spent_by_now().since(self._before)

    def is_over(self) -> bool:
        """Whether the device has got to the end."""
        return self.end_mark.is_over()

    def read(self, step: int) -> Timings:
        """The timings of the step, counted from 0, which is over."""
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
        )


def _seconds(spans: Sequence[Span]) -> float:
    return sum(end.seconds_after(begin) for begin, end in spans)
