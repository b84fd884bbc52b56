"""A run's forecast against what was measured: by part, whose fault, and what mending would bring.

A rank's exposed communication holds two things: what the exchange takes, which all ranks wait for
alike, and waiting for a rank that is late, which that one does not. So per step the least exposed
time over ranks is the exchange's, and the gap between the latest rank's own part (data and
compute) and the median rank's is the stragglers'.

A run's forecast in another mode than every_step, against what was measured.

A step of a server ends as gradients arrive, and replicas wait for each other once a round. So means
of rank 0's steps are compared, of which the first after the warm ones is left out.

The forecast of a split network, or of one in stages, against what was measured.

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
from firecaffe.runs.explain import Explanation, Rows
from firecaffe.runs.folder import FORECAST, read_run_file
from firecaffe.runs.schemas import (
    ActivationsRow,
    EveryStepForecast,
    ModeForecast,
    ScoredResult,
    ServerForecast,
    SplitForecast,
    StagesForecast,
)
from firecaffe.schema import checked

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
    `runs.score`, and one of a split network in `runs.score`.

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
