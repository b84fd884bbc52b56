"""A run's curves: loss and metric against time, samples and bytes, and facts of its mode."""

from dataclasses import dataclass
from typing import Any

from firecaffe.errors import RunError
from firecaffe.runs.run_folder import METRICS
from firecaffe.runs.run_table import TableRun, samples_seen
from firecaffe.runs.schemas import MetricsRow, TimedRow
from firecaffe.schema import Real, checked, read_rows
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, EVERY_STEP, LOCAL, SERVED, STALE

NUMBERS = {
    BACKUP: ("backup_workers", "b"),
    STALE: ("max_staleness", "s"),
    ASYNCHRONOUS: ("gradients_per_update", "c"),
    LOCAL: ("local_steps", "H"),
}


def mode_of(run: TableRun) -> str:
    mode = str(run.words.get("synchrony.mode", EVERY_STEP))
    if mode not in NUMBERS:
        return mode
    word, letter = NUMBERS[mode]
    return f"{mode}, {letter} = {run.words.get(f'synchrony.{word}')}"


def is_simulated(run: TableRun) -> bool:
    """Whether one process simulated several learners, so that its time cannot be compared."""
    is_served = run.words.get("synchrony.mode") in SERVED
    return is_served and run.words.get("synchrony.clock") == "simulated"


def staleness_of(run: TableRun) -> float | None:
    row = _server_row(run)
    return None if row is None else float(row["mean_staleness"])


def given_up(run: TableRun) -> int:
    """Count the samples of micro-batches that a server dropped, each as a whole micro-batch."""
    row = _server_row(run)
    size = int(run.words.get("train.micro_batch_size", 1))
    return 0 if row is None else int(row["dropped"]) * size


def sent_per_step(run: TableRun) -> float | None:
    """Return the mean bytes that all ranks send in a step; with a server, after the warm steps."""
    row = _server_row(run)
    if row is None:
        by_rank = run.result.get("sent_bytes_per_step_by_rank", [None])
        return None if None in by_rank else float(sum(by_rank))
    if "pulled_bytes_by_learner" not in row or run.result.get("resumed_from"):
        return None  # a simulated clock; or the bytes are those since the run was resumed
    moved = sum(sum(row[f"{way}_bytes_by_learner"].values()) for way in ("pulled", "pushed"))
    return float(moved / max(1, run.result["steps"] - run.words.get("synchrony.warm_steps", 0)))


def trained_samples(run: TableRun) -> int:
    return samples_seen(run) - given_up(run)


def _server_row(run: TableRun) -> dict[str, Any] | None:
    row = run.result.get("synchrony")
    if run.words.get("synchrony.mode") not in SERVED or not isinstance(row, dict):
        return None
    return row if {"mean_staleness", "dropped"} <= row.keys() else None


MAX_POINTS = 150
"""The most points of a loss curve; a picture is not wide enough for more."""


@dataclass(frozen=True)
class Point:
    time_s: float | None
    """Time of steps, without evaluations and checkpoints; None if the run continues another one."""
    samples: int
    sent_bytes: float | None
    """From all ranks; with a server, weights too. None if unknown."""
    value: float | None
    """The loss or the metric; None if it was not finite."""


@dataclass(frozen=True)
class Curves:
    loss: list[Point]
    metric: list[Point]


def curves_of(run: TableRun) -> Curves:
    path = run.folder / METRICS
    sent = sent_per_step(run)
    stride = -(-int(run.result["steps"]) // MAX_POINTS) or 1
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


def time_to(run: TableRun, target: float) -> float | None:
    """Return seconds to the target; None if not reached, or if the run continues another one."""
    gain = run.measure.gain
    for point in curves_of(run).metric:
        if point.value is not None and gain(point.value) >= gain(target):
            return point.time_s
    return None
