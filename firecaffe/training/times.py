"""The times of a step on one rank: marks in its device's queue, read when they are over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from firecaffe.data import Batch
from firecaffe.gradients.totals import Totals
from firecaffe.transport.queue import Mark, Queue

FetchBatch = Callable[[int], Batch]

Span = tuple[Mark, Mark]


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
    """With stages: the part of exposed_communication_s that this rank's stage waited for others."""
    stage: int | None = None
    """This rank's stage, counted from 0; None without stages."""
    by_rank: dict[int, tuple[int, float]] | None = None
    """With a server, by rank: counted micro-batches, and seconds to fetch and compute them."""
    activations_s: float | None = None
    """The part of exposed_communication_s that exchanges between layers of a split network took.

    By `rows` it includes the sums of weights' gradients. The rest went to other gradients.
    """
    processor_s: float | None = None
    """On a CPU: how much of compute_s this rank's thread had a processor."""


@dataclass(frozen=True)
class Spent:
    """Seconds that went to others while a rank computes, counted on the host from the beginning."""

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
        """Begin a step. micro_batches: this rank's number. spent: returns what was until now."""
        self._queue, self._micro_batches, self._spent_by_now = queue, micro_batches, spent
        self._before, self._start = spent(), queue.mark()
        self._waits: list[Span] = []
        self._processor_start_s, self._fetching_s = time.thread_time(), 0.0

    def timed(self, fetch: FetchBatch) -> FetchBatch:
        # A device that works behind the host does not wait for data while it has work.
        def fetch_timed(leaf: int) -> Batch:
            asked, before_s = self._queue.mark(), time.thread_time()
            batch = fetch(leaf)
            self._waits.append((asked, self._queue.mark()))
            self._fetching_s += time.thread_time() - before_s
            return batch

        return fetch_timed

    def sums_are_there(self, totals: Totals) -> None:
        """Set the sums of the step. Since its last backward the thread has slept."""
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
            processor_s=None if self._queue.works_behind else self._processor_s,
        )


def _seconds(spans: Sequence[Span]) -> float:
    return sum(end.seconds_after(begin) for begin, end in spans)
