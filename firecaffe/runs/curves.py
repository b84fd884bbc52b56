"""A run's curves: loss and metric against the time trained, the samples seen and the bytes sent."""

from dataclasses import dataclass
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.mode_facts import sent_per_step
from firecaffe.runs.run_folder import METRICS
from firecaffe.runs.run_table import Run
from firecaffe.runs.schemas import MetricsRow, TimedRow
from firecaffe.schema import Real, checked, read_rows

MOST_POINTS = 150
"""The most points of a loss curve; a picture is not wide enough for more."""


@dataclass(frozen=True)
class Point:
    time_s: float | None
    """Time of steps, without evaluations and checkpoints; None if the run continues another one."""
    samples: int
    sent_bytes: float | None
    """Bytes of gradients (with a server, also weights) from all ranks; None if unknown."""
    value: float | None
    """The loss or the metric; None if it was not finite."""


@dataclass(frozen=True)
class Curves:
    """The training loss, as means over MOST_POINTS groups of steps or fewer, and the metric."""

    loss: list[Point]
    metric: list[Point]


def curves_of(run: Run) -> Curves:
    path = run.folder / METRICS
    sent = sent_per_step(run)
    stride = -(-int(run.result["steps"]) // MOST_POINTS) or 1
    loss: list[Point] = []
    name = run.measure.name
    metric: dict[str, list[Point]] = {"validation": [], "test": []}
    time_s: float | None = 0.0
    samples, sent_bytes = 0, None if sent is None else 0.0
    some: list[float | None] = []
    is_begun = False
    if not path.exists():
        raise RunError(f"{path}: cannot be read (there is no such file)")
    try:
        for row in read_rows(path, MetricsRow):
            line: dict[str, Any] = {**row}
            if row["kind"] in metric:
                value: float | None = checked(line.get(name), Real | None)  # type: ignore[arg-type]
                metric[row["kind"]].append(Point(time_s, samples, sent_bytes, value))
                continue
            checked(line, TimedRow)
            if not is_begun and line["step"] > 1:
                time_s, samples = None, (line["step"] - 1) * line["samples"]
            is_begun = True
            if time_s is not None:
                time_s += line["samples"] / line["images_per_s"]
            samples += line["samples"]
            sent_bytes = None if sent is None else line["step"] * sent
            some.append(line["loss"])
            if len(some) == stride:
                loss.append(Point(time_s, samples, sent_bytes, _mean(some)))
                some = []
        if some:
            loss.append(Point(time_s, samples, sent_bytes, _mean(some)))
    except ValueError as error:
        raise RunError(f"{path}: cannot be read ({error})") from error
    # Runs without validation samples, and older runs, have evaluations of test samples.
    return Curves(loss, metric["validation"] or metric["test"])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def time_to(run: Run, target: float) -> float | None:
    """Return seconds to the target; None if not reached, or if the run continues another one."""
    gain = run.measure.gain
    for point in curves_of(run).metric:
        if point.value is not None and gain(point.value) >= gain(target):
            return point.time_s
    return None
