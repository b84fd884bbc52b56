"""A run's forecast against what was measured: by part, whose fault, and what mending would bring.

A rank's exposed communication holds two things: what the exchange takes, which all ranks wait for
alike, and waiting for a rank that is late, which that one does not. So per step the least exposed
time over ranks is the exchange's, and the gap between the latest rank's own part (data and
compute) and the median rank's is the stragglers'.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.explain import Explanation, Rows
from firecaffe.runs.folder import FORECAST, read_run_file
from firecaffe.runs.schemas import EveryStepForecast

LEAST_GAIN = 0.01
"""Share of a step: a gain that is smaller is not told."""

LEAST_MISS = 0.05
"""Share of a step: a part that is outside its band by less is no wrong forecast."""

ADVICE = {
    "compute_s": "a faster device, larger micro-batches, bfloat16 (train.autocast)",
    "stragglers_s": "mend or leave out the slow rank; see who is slow",
    "exchange_s": "another exchange, a compressor, a faster link; see `firecaffe plan`",
    "data_s": "the data set in memory or on faster storage, cheaper augmentation",
    "update_s": "fewer, larger parameters; a cheaper solver",
    "rest_s": "fewer checkpoints and evaluations, tensorboard off",
}


@dataclass(frozen=True)
class StepPart:
    """One part of a step, in seconds: forecast with its band, and measured."""

    name: str
    forecast_s: float
    low_s: float
    high_s: float
    measured_s: float

    @property
    def is_outside(self) -> bool:
        return not self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True)
class Score:
    """How good the forecast was, and what the difference is made of."""

    cluster: str
    step: StepPart
    parts: list[StepPart]
    lines: list[str]
    """The score in words: first the forecast, then causes, the most worth mending first."""


def measured_parts(timings: Rows) -> dict[str, float]:
    """Medians over steps of the parts of a step, the first step left out.

    The step is that of the slowest rank's median. The slowest of each step would take longer than
    they do on average: who is late in one is early in the next, as all keep one pace. Stragglers
    are those of each step; where they are others in each, the parts add up to more than the step.

    Raises: RunError if no step is there on all ranks.
    """
    by_rank = {rank: {row["step"]: row for row in rows[1:]} for rank, rows in timings.items()}
    present = [set(rows) for rows in by_rank.values() if rows]
    steps = sorted(set.intersection(*present)) if present else []
    if not steps:
        raise RunError("the run has no step, after its first, that all ranks did")
    columns: dict[str, list[float]] = {name: [] for name in ADVICE}
    for step in steps:
        rows = [own[step] for own in by_rank.values() if own]
        own_s = [row["compute_s"] + row["data_s"] for row in rows]
        middle_s = median(own_s)
        columns["compute_s"].append(median(row["compute_s"] for row in rows))
        columns["data_s"].append(median(row["data_s"] for row in rows))
        columns["stragglers_s"].append(max(own_s) - middle_s)
        exposed_s = min(row["exposed_communication_s"] for row in rows)
        columns["exchange_s"].append(exposed_s)
        columns["update_s"].append(median(row["update_s"] for row in rows))
    of_rank = [[own[step]["step_s"] for step in steps] for own in by_rank.values() if own]
    found = {name: median(values) for name, values in columns.items() if values}
    step_s = max(map(median, of_rank))
    told = sum(found.values())
    return {**found, "step_s": step_s, "rest_s": max(0.0, step_s - told)}


def score(folder: Path, timings: Rows, explanation: Explanation) -> Score | None:
    """None if the run has no forecast; one of another mode than every_step is scored in
    `runs.score_mode`, and one of a split network in `runs.score_parallel`.

    Raises: RunError if it is damaged.
    """
    if not (folder / FORECAST).is_file():
        return None
    forecast = read_run_file(folder, FORECAST)
    if "mode" in forecast or "parallel" in forecast:
        return None
    forecast = read_run_file(folder, FORECAST, EveryStepForecast)
    measured, cluster = measured_parts(timings), forecast["cluster"]
    parts = [_part(name, forecast, measured[name]) for name in ADVICE]
    step = step_part(forecast, measured["step_s"])
    return Score(cluster, step, parts, _lines(cluster, step, parts, explanation))


def _part(name: str, forecast: Mapping[str, Any], measured_s: float) -> StepPart:
    if name == "rest_s":
        return StepPart(name, 0.0, 0.0, 0.0, measured_s)
    if name == "stragglers_s":
        said = forecast["stragglers_s"]
        return StepPart(name, said, 0.0, 2 * said, measured_s)
    key = "exposed_communication_s" if name == "exchange_s" else name
    said, low, high = forecast[key], forecast["low"][key], forecast["high"][key]
    if name == "compute_s":
        waits = forecast["stragglers_s"]
        return StepPart(name, said - waits, low - waits, high - waits, measured_s)
    return StepPart(name, said, low, high, measured_s)


def step_part(forecast: Mapping[str, Any], measured_s: float) -> StepPart:
    """The step's time."""
    low, high = forecast["step_low_s"], forecast["step_high_s"]
    return StepPart("step_s", forecast["step_s"], low, high, measured_s)


def step_line(cluster: str, step: StepPart) -> str:
    """The score of the step's time, in words."""
    error = step.forecast_s / step.measured_s - 1
    inside = "outside" if step.is_outside else "inside"
    return (
        f"forecast for {cluster}: {_ms(step.forecast_s)} a step ({_ms(step.low_s)} to "
        f"{_ms(step.high_s)}); measured {_ms(step.measured_s)}, {inside} the band, the forecast "
        f"{abs(error):.0%} {'long' if error > 0 else 'short'}"
    )


def _lines(
    cluster: str, step: StepPart, parts: Sequence[StepPart], explanation: Explanation
) -> list[str]:
    lines = [step_line(cluster, step)]
    for part in parts:
        gap_s = max(part.low_s - part.measured_s, part.measured_s - part.high_s)
        if part.name in ("rest_s", "stragglers_s") or gap_s <= LEAST_MISS * step.measured_s:
            continue
        lines.append(
            f"{_title(part.name)}: forecast {_ms(part.forecast_s)} ({_ms(part.low_s)} to "
            f"{_ms(part.high_s)}), measured {_ms(part.measured_s)}; {_whose(part, explanation)}"
        )
    return [*lines, *causes({part.name: part.measured_s for part in (*parts, step)})]


def causes(measured: Mapping[str, float]) -> list[str]:
    """What mending each part but computing would bring, the most first; of measured parts."""
    step_s = measured["step_s"]
    lines = []
    for name in sorted(ADVICE, key=measured.__getitem__, reverse=True):
        gain = measured[name] / step_s if step_s else 0.0
        if name != "compute_s" and gain >= LEAST_GAIN:
            lines.append(
                f"{_title(name)} takes {gain:.1%} of a step; without it the run would be "
                f"{1 / (1 - min(gain, 0.99)) - 1:.1%} faster: {ADVICE[name]}"
            )
    return lines


def _whose(part: StepPart, explanation: Explanation) -> str:
    """Computing and data are the median rank's, which one slow rank does not move; only a slow link
    makes everybody's exchange long.
    """
    slow = [each for each in explanation.slow if each.cause == "link"]
    if part.name == "exchange_s" and part.measured_s > part.high_s:
        if slow:
            return f"the link of rank {slow[0].rank} is slow, so it is the run's"
        if explanation.not_tested:
            return "the forecast was wrong, or a link is slow, which was not tested"
    return "the forecast itself was wrong"


def _title(name: str) -> str:
    return name.removesuffix("_s").replace("exchange", "exposed exchange")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
