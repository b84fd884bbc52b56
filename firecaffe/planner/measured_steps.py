"""Makes a device's measured step of the timings of a training's steps on rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

from firecaffe.planner.calibrate import LEAST_ERROR, jitter_of, relative_spread
from firecaffe.planner.cluster import MeasuredStep
from firecaffe.planner.workload import Workload

FEWEST_SAMPLES = 8
"""The fewest measured steps that replace a forecast."""

IN_COMPUTE_S = 1e-9
"""An update's time if it is a part of the time of computing; 0 would mean that it is unknown."""

Row = Mapping[str, Any]
"""A line of timings/rank-0.jsonl."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Rank 0's times of some steps: medians, in seconds of a micro-batch."""

    first_step: int
    last_step: int
    micro_batches: float
    """Of rank 0 in a step; with a server of all workers."""
    compute_s: float
    data_s: float
    update_s: float
    """Of a step; 0 if unknown."""
    error: float
    """Half the spread of the middle four fifths of `compute_s`, over their median."""
    jitter: float
    """The deviation of a micro-batch's time over its mean."""

    @classmethod
    def of(cls, rows: Sequence[Row], in_replicas: bool, per_update: int) -> Self | None:
        """Combine rows of timings; None if they are too few. Rows of a stage tell of it alone.

        in_replicas: each worker updates its own replicas, which are averaged now and then.
        per_update: the gradients that a server waits for before an update.
        """
        served = [row for row in rows if row.get("by_rank")]
        counted = [row for row in served or rows if _count(row)]
        if len(counted) < FEWEST_SAMPLES:
            return None
        computes_s = [
            (sum(seconds for _, seconds in _works(row)) + in_replicas * row["update_s"])
            / _count(row)
            for row in counted
        ]
        updates_s = [
            row["update_s"] * per_update / _count(row) if served else row["update_s"]
            for row in counted
        ]
        micro_batches = median(_count(row) for row in counted)
        spread = relative_spread(computes_s)
        return cls(
            first_step=counted[0]["step"],
            last_step=counted[-1]["step"],
            micro_batches=micro_batches,
            compute_s=max(1e-9, median(computes_s)),
            data_s=0.0 if served else median(row["data_s"] / _count(row) for row in counted),
            # Replicas make updates while they compute.
            update_s=IN_COMPUTE_S if in_replicas else median(updates_s),
            error=max(LEAST_ERROR, spread),
            jitter=jitter_of(spread, micro_batches),
        )

    def of_micro_batch(self, work: Workload) -> MeasuredStep:
        return MeasuredStep(
            model=work.model,
            micro_batch_size=work.micro_batch_size,
            compute_s=self.compute_s,
            data_s=self.data_s,
            update_s=self.update_s,
            autocast=work.autocast,
            error=self.error,
        )

    def of_step(self, micro_batches: int | None) -> tuple[float, float, float]:
        """Compute, data and update of a step with so many micro-batches; None: as measured."""
        count = micro_batches or self.micro_batches
        return count * self.compute_s, count * self.data_s, self.update_s


def _works(row: Row) -> Sequence[tuple[int, float]]:
    """Micro-batches and seconds; with a server of each worker, with fetching."""
    by_rank = row.get("by_rank")
    return [*by_rank.values()] if by_rank else [(row["micro_batches"], row["compute_s"])]


def _count(row: Row) -> int:
    return sum(count for count, _ in _works(row))


def scaled(step: MeasuredStep, compute: float, data: float, update: float) -> MeasuredStep:
    return replace(
        step,
        compute_s=step.compute_s * compute,
        data_s=step.data_s * data,
        update_s=step.update_s * update,
    )
