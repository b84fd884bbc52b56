"""The file fault.json: the faults of a run's ranks, the latest first."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from firecaffe.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    FirecaffeError,
    LauncherLostError,
    NotFiniteError,
    PeerLostError,
    PreemptedError,
    RunError,
    UnfitCheckpointError,
    WorkerKilledError,
    memory_full,
)
from firecaffe.faults import ANOTHER, GOES_ON, ITSELF, TOGETHER, Fault
from firecaffe.files import folder_lock, write_json
from firecaffe.runs.schemas import FaultRow, StepRow
from firecaffe.schema import read_file, read_rows

NAME = "fault.json"

UNKNOWN_NEXT = "this attempt ended"
"""The consequence of a fault as far as ranks know; a launcher knows more."""

TIME = "%Y-%m-%dT%H:%M:%S%z"

ONE_EVENT_S = 60.0
"""Seconds within which reports of a lost rank, by rank 0 and a launcher, are one event."""

KIND_OF = {
    UnfitCheckpointError: "exception",  # caused by the user's settings, not by a disk
    DataError: "data",
    CheckpointError: "checkpoint",
    WorkerKilledError: "worker_killed",
    LauncherLostError: "launcher_killed",
    NotFiniteError: "not_finite",
    DivergedError: "diverged",
    PreemptedError: "preempted",
}


def kind_of(error: BaseException) -> str:
    if memory_full(error) is not None:
        return "out_of_memory"
    return next((word for kind, word in KIND_OF.items() if isinstance(error, kind)), "exception")


def fault_of(error: BaseException, rank: int, host: str, step: int) -> Fault | None:
    """Describe the exception that ends this rank; None if the rank at fault is unknown."""
    if isinstance(error, PeerLostError):
        return error.fault
    kind = kind_of(error)
    if kind == "exception" and isinstance(error, FirecaffeError):
        return Fault("other", rank, host, step, ITSELF, str(error), error.exit_code)
    if isinstance(error, NotFiniteError | DivergedError) and error.step:
        step = error.step  # on a GPU, a later step is under way by now
    name = f"{type(error).__name__}: " if kind == "exception" else ""
    is_secondary = isinstance(error, FirecaffeError) and error.is_secondary
    seen = ANOTHER if is_secondary else ITSELF
    return Fault(kind, rank, host, step, seen, " ".join(f"{name}{error}".split()))


def with_can_resume(folder: Path | None, fault: Fault) -> Fault:
    """Add whether the run folder has a checkpoint, from which the same command resumes."""
    checkpoints = None if folder is None else folder / "checkpoints"
    if checkpoints is not None and not checkpoints.is_dir():
        return fault  # they are on another host
    has_any = checkpoints is not None and any(checkpoints.glob("step-*"))
    return dataclasses.replace(fault, can_resume=has_any, folder=str(folder) if has_any else "")


def write_fault(folder: Path, fault: Fault, then: str = UNKNOWN_NEXT) -> str:
    """Record a fault once, before earlier ones. Return why that failed; empty if written."""
    try:
        with folder_lock(folder):
            earlier = _read(folder / NAME)
            known = next((row for row in _newest(earlier) if is_same(row, fault, then)), None)
            if known is not None:
                if fault.kind in TOGETHER:
                    return ""  # the first report counts
                if fault.kind == "gone" and known["kind"] != "gone":
                    return ""  # a closed connection adds nothing
                if known["then"] == GOES_ON:
                    fault = dataclasses.replace(fault, step=max(fault.step, known["step"]))
                earlier.remove(known)
            row = {**fault.as_json(), "then": then, "time": time.strftime(TIME)}
            write_json(folder / NAME, {**row, "earlier": earlier})
    except (OSError, ValueError) as error:
        return f"{folder / NAME} could not be written: {getattr(error, 'strerror', None) or error}"
    return ""


def settle_fault(folder: Path | None, fault: Fault, then: str) -> Fault:
    """Complete a fault for a launcher with the rank's last step, and record it in the folder."""
    if folder is None:
        return fault
    fault = with_can_resume(folder, fault)
    if fault.step == 0:
        fault = dataclasses.replace(fault, step=_step_under_way(folder, fault.rank))
    problem = write_fault(folder, fault, then)
    if problem and problem not in fault.detail:
        fault = dataclasses.replace(fault, detail=f"{fault.detail}; {problem}")
    return fault


def _step_under_way(folder: Path, rank: int) -> int:
    path = folder / f"timings/rank-{rank}.jsonl"
    with suppress(RunError):
        for last in deque(read_rows(path, StepRow), maxlen=1):
            return last["step"] + 1
    return 0


def is_same(row: dict[str, Any], fault: Fault, then: str) -> bool:
    """Whether both describe one event. Later reports may know the cause and the step better."""
    step, is_of_rank = row.get("step"), row.get("rank") == fault.rank
    if not isinstance(step, int) or row.get("then") not in (UNKNOWN_NEXT, GOES_ON):
        return False  # a launcher has settled the recorded fault, so this one is new
    if GOES_ON in (row["then"], then):
        return is_of_rank and _age_s(row) < ONE_EVENT_S  # steps continue, so they may differ
    is_of_all = fault.kind in TOGETHER and row.get("kind") == fault.kind
    return (is_of_all or is_of_rank) and abs(step - fault.step) <= 1


def _age_s(row: dict[str, Any]) -> float:
    try:
        written = datetime.strptime(row["time"], TIME)
        return abs((datetime.now(UTC) - written).total_seconds())
    except (KeyError, TypeError, ValueError):
        return float("inf")


def _newest(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    # If the others continue, more ranks may have been lost after an earlier one.
    for row in rows:
        yield row
        if row.get("then") != GOES_ON:
            return


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        row: dict[str, Any] = {**read_file(path, FaultRow, RunError)}
    except RunError:
        return []
    return [row, *row.pop("earlier", [])]
