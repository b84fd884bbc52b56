"""The forecast of a split network, or of one in stages, against what was measured.

What a rank waits for is told by what was exchanged: activations between layers, and gradients. All
ranks wait for these alike, and beside it for who is late, so the least of a step's ranks is the
exchange's. Stages wait for each other by design: of them the share of a step is compared in which
they do not compute.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.explain import Rows
from firecaffe.runs.folder import FORECAST, read_run_file
from firecaffe.runs.schemas import ActivationsRow, SplitForecast, StagesForecast
from firecaffe.runs.score import StepPart, step_line, step_part
from firecaffe.runs.score_mode import Figure
from firecaffe.schema import checked

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ParallelScore:
    """How good the forecast was."""

    cluster: str
    step: StepPart
    figures: list[Figure]

    @property
    def lines(self) -> list[str]:
        return [step_line(self.cluster, self.step), *(each.line for each in self.figures)]


def score_parallel(folder: Path, timings: Rows) -> ParallelScore | None:
    """None if the run has no forecast of a split network or of stages, or no step after its first.

    Raises: RunError if a file is damaged.
    """
    if not (folder / FORECAST).is_file():
        return None
    forecast = read_run_file(folder, FORECAST)
    if "parallel" not in forecast:
        return None
    by_rank = [rows[1:] for _, rows in sorted(timings.items()) if len(rows) > 1]
    if not by_rank:
        return None
    in_stages = bool(forecast["parallel"].get("stages"))
    forecast = read_run_file(folder, FORECAST, StagesForecast if in_stages else SplitForecast)
    if not in_stages:
        try:
            checked(by_rank, list[list[ActivationsRow]])
        except ValueError as error:
            raise RunError(f"{folder}: its timings: {error}") from error
    step = step_part(forecast, max(median(row["step_s"] for row in rows) for rows in by_rank))
    found = _of_stages if in_stages else _of_split
    return ParallelScore(forecast["cluster"], step, [*found(forecast, by_rank)])


def _of_split(forecast: Row, by_rank: Sequence[Sequence[Row]]) -> Iterator[Figure]:
    steps = [*zip(*by_rank, strict=False)]
    computes_s = median(median(row["compute_s"] for row in rows) for rows in steps)
    yield _figure("compute", forecast["compute_s"] - forecast["stragglers_s"], computes_s)
    activations_s = median(min(row["activations_s"] for row in rows) for rows in steps)
    yield _figure("waits for activations", forecast["activations_s"], activations_s)
    gradients_s = median(min(_gradients_s(row) for row in rows) for rows in steps)
    yield _figure("waits for gradients", forecast["exposed_communication_s"], gradients_s)
    updates_s = median(median(row["update_s"] for row in rows) for rows in steps)
    yield _figure("update", forecast["update_s"], updates_s)


def _of_stages(forecast: Row, by_rank: Sequence[Sequence[Row]]) -> Iterator[Figure]:
    computes_s = [median(row["compute_s"] for row in rows) for rows in by_rank]
    longest_s = forecast["compute_s"] - forecast["stragglers_s"]
    yield _figure("compute of the slowest stage", longest_s, max(computes_s))
    steps_s = [median(row["step_s"] for row in rows) for rows in by_rank]
    idle = 1 - fmean(computes_s) / fmean(steps_s)
    yield Figure("a stage does not compute", " %", forecast["idle"] * 100, idle * 100)


def _gradients_s(row: Row) -> float:
    return float(row["exposed_communication_s"] - row["activations_s"])


def _figure(name: str, forecast_s: float, measured_s: float) -> Figure:
    return Figure(name, " ms", forecast_s * 1e3, measured_s * 1e3)
