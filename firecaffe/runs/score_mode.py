"""A run's forecast in another mode than every_step, against what was measured.

A step of a server ends as gradients arrive, and replicas wait for each other once a round. So means
of rank 0's steps are compared, of which the first after the warm ones is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from firecaffe.runs.explain import Rows
from firecaffe.runs.folder import FORECAST, read_run_file
from firecaffe.runs.schemas import ModeForecast, ScoredResult, ServerForecast
from firecaffe.runs.score import StepPart, step_line, step_part


@dataclass(frozen=True)
class Figure:
    """A number beside the step's time: forecast, and measured."""

    name: str
    unit: str
    """What stands behind it for people."""
    forecast: float
    measured: float

    @property
    def line(self) -> str:
        times = f" ({self.measured / self.forecast:.2f} times)" if self.forecast else ""
        said, found = (f"{each:,.3g}{self.unit}" for each in (self.forecast, self.measured))
        return f"{self.name}: forecast {said}, measured {found}{times}"


@dataclass(frozen=True)
class ModeScore:
    """How good the forecast was."""

    cluster: str
    mode: str
    """In words, with its number."""
    step: StepPart
    figures: list[Figure]

    @property
    def lines(self) -> list[str]:
        cluster = f"{self.cluster} in mode {self.mode}"
        return [step_line(cluster, self.step), *(each.line for each in self.figures)]


def score_mode(folder: Path, timings: Rows) -> ModeScore | None:
    """None if the run has no forecast, or one of every_step, or no step that it is of.

    timings: of rank 0 at least. Raises: RunError if a file is damaged.
    """
    if not (folder / FORECAST).is_file():
        return None
    forecast = read_run_file(folder, FORECAST)
    if "mode" not in forecast:
        return None
    kind = ServerForecast if forecast.get("average_s") is None else ModeForecast
    forecast = read_run_file(folder, FORECAST, kind)
    rows = [row for row in timings.get(0, ()) if row["step"] > forecast["after_step"]][1:]
    if not rows:
        return None
    result = None
    if kind is ServerForecast and (folder / "result.json").is_file():
        result = read_run_file(folder, "result.json", ScoredResult)
    step = step_part(forecast, fmean(row["step_s"] for row in rows))
    figures = list(_figures(forecast, rows, result))
    return ModeScore(forecast["cluster"], forecast["mode_in_words"], step, figures)


def _figures(
    forecast: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
) -> Iterator[Figure]:
    averages = [row["exchange_s"] for row in rows if row.get("exchange_s")]
    if forecast["average_s"] and averages:
        yield Figure("an average", " ms", forecast["average_s"] * 1e3, fmean(averages) * 1e3)
    if result is None:
        return
    came_to = result["synchrony"]
    done = max(1, came_to["gradients"] + came_to["dropped"])
    yield Figure("staleness", "", forecast["staleness"], came_to["mean_staleness"])
    if forecast["dropped"] or came_to["dropped"]:
        dropped = came_to["dropped"] / done
        yield Figure("given up", " %", forecast["dropped"] * 100, dropped * 100)
    idle = fmean(came_to["idle_by_rank"].values())
    yield Figure("idle time of a worker", " %", forecast["idle"] * 100, idle * 100)
    if not result["resumed_from"]:  # bytes are those since then
        moved = sum(
            sum(came_to[f"{way}_bytes_by_learner"].values()) for way in ("pulled", "pushed")
        )
        steps = max(1, result["steps"] - forecast["after_step"])
        yield Figure("a step sends", " MB", forecast["bytes_per_step"] / 1e6, moved / steps / 1e6)
