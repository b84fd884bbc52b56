"""Several trainings at once: each is a `firecaffe train` process with its own run folder."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, TypedDict

import torch

from firecaffe.cluster.agent import SIGNALS
from firecaffe.cluster.launcher import RankFailedError
from firecaffe.cluster.process_settings import ENDS_WITH, handlers_kept
from firecaffe.errors import PreemptedError, RunError
from firecaffe.files import read_small, write_atomically, write_json
from firecaffe.recipe.sections import Recipe, to_toml
from firecaffe.resume_advice import option
from firecaffe.runs.fault import NAME as FAULT
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.runs.run_folder import METRICS
from firecaffe.runs.schemas import FaultRow, LossRow
from firecaffe.schema import Real, checked, read_file, read_rows

POLL_S = 0.3
LOCK = ".lock"


@dataclass(frozen=True)
class TrialScore:
    step: int
    value: float
    """The task's metric."""
    is_finite: bool
    """Whether the loss is still a number."""


@dataclass
class Trial:
    """One of several trainings. If its folder holds a finished run, that run is used."""

    name: str
    recipe: Recipe
    parent: Path
    measure: Measure = TOP1
    end: Callable[[Sequence[TrialScore]], bool] = lambda _: False
    """Decides after each evaluation but the last, from all so far, whether to end the trial."""
    is_test_scored: bool = False
    """Whether its result on test samples counts, instead of its evaluations during training."""
    ended_early: bool = field(default=False, init=False)
    scores: list[TrialScore] = field(default_factory=list, init=False)

    @property
    def folder(self) -> Path:
        return self.parent / self.name

    @property
    def recipe_path(self) -> Path:
        return self.parent / f"{self.name}.toml"

    @property
    def text(self) -> str:
        run = replace(self.recipe.run, folder=str(self.folder), tensorboard=False)
        return to_toml(replace(self.recipe, run=run))

    @property
    def is_there(self) -> bool:
        """Whether the folder is exactly this training's, finished or not."""
        try:
            return read_small(self.recipe_path) == self.text and self.folder.is_dir()
        except (OSError, ValueError):
            return False

    @property
    def is_finished(self) -> bool:
        return (self.folder / "result.json").exists()

    def look(self) -> bool:
        """Read the new evaluations. Returns whether the training is to be ended now."""
        evaluations = scores(self.folder, self.measure)
        while not self.ended_early and len(self.scores) < len(evaluations):
            self.scores.append(evaluations[len(self.scores)])
            last = self.scores[-1]
            is_last = last.is_finite and last.step >= self.recipe.train.steps > 0
            self.ended_early = not is_last and self.end(self.scores)
        return self.ended_early


def scores(folder: Path, measure: Measure = TOP1) -> list[TrialScore]:
    """Return a run's evaluations on its validation samples so far, in order. Raises: RunError."""
    path = folder / METRICS
    lines = read_rows(path, LossRow, holding=b'"validation"')
    try:
        validations = [_score({**row}, measure) for row in lines if row["kind"] == "validation"]
    except ValueError as error:
        raise RunError(f"{path}: cannot be read ({error})") from error
    return [*validations, *_diverged(folder, validations, measure)]


class Value(TypedDict):
    value: Real | None


def _score(row: dict[str, Any], measure: Measure) -> TrialScore:
    # A NaN counts as the worst value. Raises: ValueError if the value is missing.
    value = checked({"value": row[measure.name]} if measure.name in row else {}, Value)["value"]
    worst = measure.gain(-inf)
    is_finite = row["loss"] is not None
    return TrialScore(row["step"], worst if value is None else value, is_finite)


def _diverged(
    folder: Path, validations: Sequence[TrialScore], measure: Measure
) -> list[TrialScore]:
    # The score of a run that has ended because it diverged.
    if not (folder / FAULT).exists():
        return []
    fault = read_file(folder / FAULT, FaultRow, RunError)
    if fault.get("kind") not in ("not_finite", "diverged"):
        return []
    none = 0.0 if measure.is_share and measure.higher_is_better else measure.gain(-inf)
    return [TrialScore(fault.get("step", 0), validations[-1].value if validations else none, False)]


@contextmanager
def command_lock(folder: Path) -> Iterator[int]:
    """Lock a folder of trainings, for this process and those that it starts. Yields the descriptor.

    While a process that inherits it lives, no other command works there. Raises: RunError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(
            f"{folder}: another command works there, or a training that one has left; wait for it"
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def claim_folder(record: Path, wanted: dict[str, Any], what: str, instead: str) -> None:
    """Record what a command wants of a folder. Raises: RunError if the folder holds something else.

    what: the folder's content by another record, with `{}` for the entries that differ. instead:
    what another value of --out is.
    """
    folder = record.parent
    if not record.exists():
        if any(entry.name != LOCK for entry in folder.iterdir()):
            raise RunError(f"{folder}: holds other files; give {option('out')} another {instead}")
        write_json(record, wanted)
        return
    recorded = read_file(record, dict[str, Any], RunError)
    if unlike := [name for name in wanted if recorded.get(name) != wanted[name]]:
        held = what.format(", ".join(unlike))
        raise RunError(f"{folder}: holds {held}; give {option('out')} another {instead}")


def run_trials(
    trials: Sequence[Trial], at_once: int, workers: int, lock: int, say: Callable[[Trial], None]
) -> None:
    """Train the trials that are not finished, `at_once` at a time, on `workers` ranks each.

    An interrupted training begins again; none is left running, even if this process is killed. say:
    called with each trial as it ends. Raises: RankFailedError, with the exit code of the first that
    failed; PreemptedError.
    """
    waiting = []
    for trial in trials:
        if trial.is_there and (trial.look() or trial.is_finished):
            say(trial)
        else:
            waiting.append(trial)
    running: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
    try:
        with handlers_kept(SIGNALS) as kept:
            asked: list[int] = []  # and no exception, which might come as a process is started
            for number in kept:
                signal.signal(number, lambda sent, _: asked.append(sent))
            while waiting or running:
                for slot in range(at_once):
                    if waiting and slot not in running:
                        trial = waiting.pop(0)
                        running[slot] = (trial, _start(trial, workers, slot, lock))
                for slot, (trial, process) in list(running.items()):
                    if not trial.ended_early and trial.look() and process.poll() is None:
                        process.terminate()
                    if process.poll() is not None:
                        del running[slot]
                        trial.look()
                        _check_end(trial, process.returncode)
                        say(trial)
                time.sleep(POLL_S)
                if asked:
                    raise PreemptedError("stopped on request; the same command continues it")
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.wait()


def _start(trial: Trial, workers: int, slot: int, lock: int) -> subprocess.Popen[bytes]:
    _put_aside(trial)
    trial.scores.clear()
    write_atomically(trial.recipe_path, trial.text)
    with open(trial.parent / f"{trial.name}.log", "wb") as log:
        return subprocess.Popen(
            command_of(trial.recipe_path, workers),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment_of(slot, workers) | {ENDS_WITH: str(os.getpid())},
            pass_fds=[lock],
        )


def command_of(recipe: Path, workers: int) -> list[str]:
    command = [sys.executable, "-P", "-m", "firecaffe", "train", str(recipe)]
    return [*command, "--nproc-per-node", str(workers)]


def _put_aside(trial: Trial) -> None:
    number = 1
    while (aside := trial.parent / f"{trial.name}.left-{number}").exists():
        number += 1
    if trial.folder.exists():
        trial.folder.rename(aside)


def environment_of(slot: int, workers: int) -> dict[str, str]:
    """Return a slot's environment, with its own GPUs if there are enough for all slots."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = shown.split(",") if shown else list(map(str, range(torch.cuda.device_count())))
    slot_gpus = gpus[slot * workers : (slot + 1) * workers]
    return os.environ | (
        {"CUDA_VISIBLE_DEVICES": ",".join(slot_gpus)} if len(slot_gpus) == workers else {}
    )


def _check_end(trial: Trial, code: int) -> None:
    if trial.ended_early or (code == 0 and trial.is_finished):
        return
    log = trial.parent / f"{trial.name}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = lines[-1].removeprefix("firecaffe: ") if lines else f"exit code {code}"
    raise RankFailedError(f"{trial.name}: {said} (see {log})", code if 0 < code < 256 else 1)
