"""Compares a run's forecast with measurements, and says what each improvement would bring.

All ranks wait equally for the exchange, and also for a late rank, which does not wait itself. So
the least exposed time over the ranks of a step is the exchange's, and the gap between the latest
and the median rank's data and compute is the stragglers'. In a split network, waits for activations
and for gradients are the least over ranks too. Stages wait for each other by design, so the share
of a step in which they do not compute is compared. Steps of a server end as gradients arrive, and
replicas wait once a round, so means of rank 0's steps are compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.rank_times import Explanation, Rows, later_rows, overloaded
from firecaffe.runs.run_folder import FORECAST, read_run_file
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

Row = Mapping[str, Any]


@dataclass(frozen=True)
class LastForecast:
    """The last forecast of a run, which may have replaced the one made before the first step."""

    row: Row
    timings: Rows
    """Times of the steps that it was not made from, after one step that readers leave out."""
    first_s: float | None = None
    """A step's seconds by the first forecast, if this one replaced it."""


def _checked(place: object, words: Any, kind: Any) -> Any:
    try:
        return checked(words, kind)
    except ValueError as error:
        raise RunError(f"{place}: {error}") from error


def read_forecast(folder: Path, timings: Rows) -> LastForecast | None:
    """Read a run's last forecast that later steps can score; None without one. Raises: RunError."""
    if not (folder / FORECAST).is_file():
        return None
    first = read_run_file(folder, FORECAST)
    refined = first.get("refined")
    if refined is not None:
        later = later_rows(timings, refined["made_from"]["last_step"] - 1)
        if any(len(rows) > 1 for rows in later.values()):
            return LastForecast(refined, later, first.get("step_s"))
    return LastForecast(first, timings)


MIN_GAIN = 0.01
"""The least gain, as a share of a step, that is reported."""

MIN_MISS = 0.05
"""A part's forecast is wrong if it misses its band by more than this share of a step."""

ADVICE = {
    "compute_s": "a faster device, larger micro-batches, bfloat16 (train.autocast)",
    "stragglers_s": "leave out a rank that is named as slow; without one, larger micro-batches",
    "exchange_s": "another exchange, a compressor, a faster link; see `firecaffe plan`",
    "data_s": "the data set in memory or on faster storage, cheaper augmentation",
    "update_s": "a larger batch, a cheaper solver; between hosts exchange.update_at = shards",
    "rest_s": "fewer checkpoints and evaluations, tensorboard off",
}


@dataclass(frozen=True)
class StepPart:
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
    cluster: str
    step: StepPart
    parts: list[StepPart]
    lines: list[str]
    first_s: float | None = None
    """A step's seconds by the run's first forecast, if measured steps replaced that one."""


def measured_parts(timings: Rows) -> dict[str, float]:
    """Return medians over the steps after the first of each part of a step.

    `step_s` is the slowest rank's median. A maximum of each step would be too long: a rank that is
    late in one step is early in the next. Stragglers are those of each step; if they change, the
    parts add up to more than the step. Raises RunError if no step is there on all ranks.
    """
    by_rank = {rank: {row["step"]: row for row in rows[1:]} for rank, rows in timings.items()}
    present = [set(rows) for rows in by_rank.values() if rows]
    steps = sorted(set.intersection(*present)) if present else []
    if not steps:
        raise RunError("the run has no step, after its first, that all ranks did")
    by_step = [[rows[step] for rows in by_rank.values() if rows] for step in steps]
    parts = {
        "compute_s": _typical_s(by_step, "compute_s"),
        "stragglers_s": median(map(_stragglers_s, by_step)),
        "exchange_s": _least_s(by_step, "exposed_communication_s"),
        "data_s": _typical_s(by_step, "data_s"),
        "update_s": _typical_s(by_step, "update_s"),
    }
    step_s = max(median(row["step_s"] for row in rows) for rows in zip(*by_step, strict=True))
    return {**parts, "step_s": step_s, "rest_s": max(0.0, step_s - sum(parts.values()))}


Steps = Sequence[Sequence[Row]]


def _typical_s(by_step: Steps, name: str) -> float:
    return float(median(median(row[name] for row in rows) for rows in by_step))


def _least_s(by_step: Steps, name: str) -> float:
    return float(median(min(row[name] for row in rows) for rows in by_step))


def _stragglers_s(rows: Sequence[Row]) -> float:
    alone_s = [row["compute_s"] + row["data_s"] for row in rows]
    return float(max(alone_s) - median(alone_s))


def score(folder: Path, timings: Rows, explanation: Explanation) -> Score | None:
    """Score a forecast of mode every_step, unsplit; None if there is none. Raises RunError."""
    kept = read_forecast(folder, timings)
    if kept is None or "mode" in kept.row or "parallel" in kept.row:
        return None
    forecast = _checked(folder / FORECAST, kept.row, EveryStepForecast)
    measured, cluster = measured_parts(kept.timings), forecast["cluster"]
    parts = _parts(forecast, measured)
    step = step_part(forecast, measured["step_s"])
    is_overloaded = bool(overloaded(kept.timings))
    lines = step_lines(cluster, step, kept.first_s)
    lines += _lines(step, parts, explanation, is_overloaded)
    return Score(cluster, step, parts, lines, kept.first_s)


def _parts(forecast: Row, measured: Mapping[str, float]) -> list[StepPart]:
    band, waits_s = (forecast, forecast["low"], forecast["high"]), forecast["stragglers_s"]
    bands = {
        "compute_s": [row["compute_s"] - waits_s for row in band],
        "stragglers_s": [waits_s, 0.0, 2 * waits_s],
        "exchange_s": [row["exposed_communication_s"] for row in band],
        "data_s": [row["data_s"] for row in band],
        "update_s": [row["update_s"] for row in band],
        "rest_s": [0.0, 0.0, 0.0],
    }
    return [
        StepPart(name, middle_s, low_s, high_s, measured[name])
        for name, (middle_s, low_s, high_s) in bands.items()
    ]


def step_part(forecast: Row, measured_s: float) -> StepPart:
    low, high = forecast["step_low_s"], forecast["step_high_s"]
    return StepPart("step_s", forecast["step_s"], low, high, measured_s)


def step_lines(cluster: str, step: StepPart, first_s: float | None) -> list[str]:
    error = step.forecast_s / step.measured_s - 1
    inside = "outside" if step.is_outside else "inside"
    line = (
        f"forecast for {cluster}: {ms(step.forecast_s)} a step ({ms(step.low_s)} to "
        f"{ms(step.high_s)}); measured {ms(step.measured_s)}, {inside} the band, the forecast "
        f"{abs(error):.0%} {'long' if error > 0 else 'short'}"
    )
    if first_s is None:
        return [line]
    first = first_s / step.measured_s - 1
    return [line, f"first forecast {first:+.0%}, refined by measured steps {error:+.0%}"]


def _lines(
    step: StepPart, parts: Sequence[StepPart], explanation: Explanation, is_overloaded: bool
) -> list[str]:
    lines = []
    for part in parts:
        gap_s = max(part.low_s - part.measured_s, part.measured_s - part.high_s)
        if part.name in ("rest_s", "stragglers_s") or gap_s <= MIN_MISS * step.measured_s:
            continue
        lines.append(
            f"{title_of(part.name)}: forecast {ms(part.forecast_s)} ({ms(part.low_s)} to "
            f"{ms(part.high_s)}), measured {ms(part.measured_s)}; "
            f"{_whose(part, explanation, is_overloaded)}"
        )
    return [*lines, *causes({part.name: part.measured_s for part in (*parts, step)})]


def causes(measured: Mapping[str, float]) -> list[str]:
    """Describe, largest first, the gain if each part except computing were removed."""
    step_s = measured["step_s"]
    lines = []
    for name in sorted(ADVICE, key=measured.__getitem__, reverse=True):
        gain = measured[name] / step_s if step_s else 0.0
        if name != "compute_s" and gain >= MIN_GAIN:
            times = 1 / (1 - min(gain, 0.99))
            faster = f"{times - 1:.1%} faster" if times < 2 else f"{times:.1f} times as fast"
            lines.append(
                f"{title_of(name)} takes {gain:.1%} of a step; without it the run would be "
                f"{faster}: {ADVICE[name]}"
            )
    return lines


def _whose(part: StepPart, explanation: Explanation, is_overloaded: bool) -> str:
    # Compute and data are the median rank's, which one slow rank does not change. Only a slow link
    # makes every rank's exchange long.
    slow = [entry for entry in explanation.slow if entry.cause == "link"]
    if part.name == "exchange_s" and part.measured_s > part.high_s:
        if slow:
            return f"the link of rank {slow[0].rank} is slow, so it is the run's"
        if explanation.not_tested:
            return "the forecast was wrong, or a link is slow, which was not tested"
    if is_overloaded and part.measured_s > part.high_s:
        return "the host was overloaded"
    return "the forecast itself was wrong"


def title_of(name: str) -> str:
    return name.removesuffix("_s").replace("exchange", "exposed exchange")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    forecast: float
    measured: float

    @property
    def line(self) -> str:
        times = f" ({self.measured / self.forecast:.2f} times)" if self.forecast else ""
        said, measured = (f"{value:,.3g}{self.unit}" for value in (self.forecast, self.measured))
        return f"{self.name}: forecast {said}, measured {measured}{times}"


@dataclass(frozen=True)
class ModeScore:
    cluster: str
    mode: str
    step: StepPart
    figures: list[Figure]
    first_s: float | None = None

    @property
    def lines(self) -> list[str]:
        cluster = f"{self.cluster} in mode {self.mode}"
        lines = step_lines(cluster, self.step, self.first_s)
        return [*lines, *(figure.line for figure in self.figures)]


def score_mode(folder: Path, timings: Rows) -> ModeScore | None:
    """Score a forecast of another mode; None without one or its steps. Raises RunError."""
    kept = read_forecast(folder, timings)
    if kept is None or "mode" not in kept.row:
        return None
    kind = ServerForecast if kept.row.get("average_s") is None else ModeForecast
    forecast = _checked(folder / FORECAST, kept.row, kind)
    rows = [row for row in kept.timings.get(0, ()) if row["step"] > forecast["after_step"]][1:]
    if not rows:
        return None
    result = None
    if kind is ServerForecast and (folder / "result.json").is_file():
        result = read_run_file(folder, "result.json", ScoredResult)
    step = step_part(forecast, fmean(row["step_s"] for row in rows))
    figures = list(_figures(forecast, rows, result))
    return ModeScore(forecast["cluster"], forecast["mode_in_words"], step, figures, kept.first_s)


def _figures(forecast: Row, rows: Sequence[Row], result: Row | None) -> Iterator[Figure]:
    averages = [row["exchange_s"] for row in rows if row.get("exchange_s")]
    if forecast["average_s"] and averages:
        yield _figure("an average", forecast["average_s"], fmean(averages))
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
    if not result["resumed_from"]:  # a resumed run counts bytes from there on
        moved = sum(
            sum(came_to[f"{way}_bytes_by_learner"].values()) for way in ("pulled", "pushed")
        )
        steps = max(1, result["steps"] - forecast["after_step"])
        yield Figure("a step sends", " MB", forecast["bytes_per_step"] / 1e6, moved / steps / 1e6)


@dataclass(frozen=True)
class ParallelScore:
    cluster: str
    step: StepPart
    figures: list[Figure]
    first_s: float | None = None

    @property
    def lines(self) -> list[str]:
        lines = step_lines(self.cluster, self.step, self.first_s)
        return [*lines, *(figure.line for figure in self.figures)]


def score_parallel(folder: Path, timings: Rows) -> ParallelScore | None:
    """Score a forecast of a split network or of stages; None without one. Raises RunError."""
    kept = read_forecast(folder, timings)
    if kept is None or "parallel" not in kept.row:
        return None
    by_rank = [rows[1:] for _, rows in sorted(kept.timings.items()) if len(rows) > 1]
    if not by_rank:
        return None
    in_stages = bool(kept.row["parallel"].get("stages"))
    kind, parts_of = (StagesForecast, _of_stages) if in_stages else (SplitForecast, _of_split)
    forecast = _checked(folder / FORECAST, kept.row, kind)
    if not in_stages:
        _checked(f"{folder}: its timings", by_rank, list[list[ActivationsRow]])
    step = step_part(forecast, max(median(row["step_s"] for row in rows) for rows in by_rank))
    figures = [*parts_of(forecast, by_rank)]
    return ParallelScore(forecast["cluster"], step, figures, kept.first_s)


def _of_split(forecast: Row, by_rank: Sequence[Sequence[Row]]) -> Iterator[Figure]:
    steps = [*zip(*by_rank, strict=False)]
    computed_s = forecast["compute_s"] - forecast["stragglers_s"]
    yield _figure("compute", computed_s, _typical_s(steps, "compute_s"))
    activations_s = _least_s(steps, "activations_s")
    yield _figure("waits for activations", forecast["activations_s"], activations_s)
    gradients_s = median(
        min(row["exposed_communication_s"] - row["activations_s"] for row in rows) for rows in steps
    )
    yield _figure("waits for gradients", forecast["exposed_communication_s"], gradients_s)
    yield _figure("update", forecast["update_s"], _typical_s(steps, "update_s"))


def _of_stages(forecast: Row, by_rank: Sequence[Sequence[Row]]) -> Iterator[Figure]:
    computes_s = [median(row["compute_s"] for row in rows) for rows in by_rank]
    longest_s = forecast["compute_s"] - forecast["stragglers_s"]
    yield _figure("compute of the slowest stage", longest_s, max(computes_s))
    steps_s = [median(row["step_s"] for row in rows) for rows in by_rank]
    idle = 1 - fmean(computes_s) / fmean(steps_s)
    yield Figure("a stage does not compute", " %", forecast["idle"] * 100, idle * 100)


def _figure(name: str, forecast_s: float, measured_s: float) -> Figure:
    return Figure(name, " ms", forecast_s * 1e3, measured_s * 1e3)
