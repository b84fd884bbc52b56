"""Facts of a run's mode of synchrony for a comparison: staleness, dropped samples, bytes sent."""

from typing import Any

from firecaffe.runs.run_table import Run, samples_seen
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, EVERY_STEP, LOCAL, SERVED, STALE

NUMBERS = {
    BACKUP: ("backup_workers", "b"),
    STALE: ("max_staleness", "s"),
    ASYNCHRONOUS: ("gradients_per_update", "c"),
    LOCAL: ("local_steps", "H"),
}
"""The entry of each mode that matters most, and its letter."""


def mode_of(run: Run) -> str:
    mode = str(run.words.get("synchrony.mode", EVERY_STEP))
    if mode not in NUMBERS:
        return mode
    word, letter = NUMBERS[mode]
    return f"{mode}, {letter} = {run.words.get(f'synchrony.{word}')}"


def is_simulated(run: Run) -> bool:
    """Whether one process simulated several learners, so that its time cannot be compared."""
    is_served = run.words.get("synchrony.mode") in SERVED
    return is_served and run.words.get("synchrony.clock") == "simulated"


def staleness_of(run: Run) -> float | None:
    row = _of_server(run)
    return None if row is None else float(row["mean_staleness"])


def given_up(run: Run) -> int:
    """Count the samples of micro-batches that a server dropped, each as a whole micro-batch."""
    row = _of_server(run)
    size = int(run.words.get("train.micro_batch_size", 1))
    return 0 if row is None else int(row["dropped"]) * size


def sent_per_step(run: Run) -> float | None:
    """Return the mean bytes that all ranks send in a step; with a server, after the warm steps."""
    row = _of_server(run)
    if row is None:
        by_rank = run.result.get("sent_bytes_per_step_by_rank", [None])
        return None if None in by_rank else float(sum(by_rank))
    if "pulled_bytes_by_learner" not in row or run.result.get("resumed_from"):
        return None  # a simulated clock; or the bytes are those since the run was resumed
    moved = sum(sum(row[f"{way}_bytes_by_learner"].values()) for way in ("pulled", "pushed"))
    return float(moved / max(1, run.result["steps"] - run.words.get("synchrony.warm_steps", 0)))


def trained_samples(run: Run) -> int:
    return samples_seen(run) - given_up(run)


def _of_server(run: Run) -> dict[str, Any] | None:
    row = run.result.get("synchrony")
    if run.words.get("synchrony.mode") not in SERVED or not isinstance(row, dict):
        return None
    return row if {"mean_staleness", "dropped"} <= row.keys() else None
