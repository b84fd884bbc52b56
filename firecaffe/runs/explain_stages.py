"""The times of a network's stages, whose ranks have different work."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StageTimes:
    """Medians over a stage's steps after the first. `own_s` has data, forward and backward."""

    stage: int
    own_s: float
    idle: float
    micro_batches: int


def stage_of(rows: Sequence[Mapping[str, Any]]) -> int | None:
    stage: int | None = rows[-1].get("stage") if rows else None
    return stage


def stages_of(timings: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[StageTimes]:
    rows_by_stage: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for rows in timings.values():
        stage = stage_of(rows)
        if stage is not None:
            rows_by_stage[stage] += rows[1:] or rows
    return [
        StageTimes(
            stage,
            statistics.median(row["data_s"] + row["compute_s"] for row in rows),
            statistics.median(row["idle_s"] / row["step_s"] for row in rows),
            max(row["micro_batches"] for row in rows),
        )
        for stage, rows in sorted(rows_by_stage.items())
    ]
