"""What the stages of a network took, whose ranks have other work each."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageTimes:
    """Medians over the steps of a stage's ranks, without the first, which warms up."""

    stage: int
    own_s: float
    """What a step's micro-batches take it: data, forward and backward."""
    idle: float
    """The share of a step in which it waited for others."""
    micro_batches: int
    """Of a step."""


def stage_of(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The stage of a rank, by its timings; None if the network is not in stages."""
    stage: int | None = rows[-1].get("stage") if rows else None
    return stage


def stages_of(timings: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[StageTimes]:
    """The stages in their order; none if the network is not in stages."""
    found: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for rows in timings.values():
        stage = stage_of(rows)
        if stage is not None:
            found[stage] += rows[1:] or rows
    return [
        StageTimes(
            stage,
            statistics.median(row["data_s"] + row["compute_s"] for row in rows),
            statistics.median(row["idle_s"] / row["step_s"] for row in rows),
            max(row["micro_batches"] for row in rows),
        )
        for stage, rows in sorted(found.items())
    ]
