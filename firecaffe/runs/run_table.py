"""Finished runs side by side, as in FireCaffe's table 2 (Iandola et al. 2016, arXiv 1511.00175)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from firecaffe.errors import RunError
from firecaffe.runs.measure import LOSS, Measure, failure, measure_of, unlike_measures
from firecaffe.runs.run_folder import RECIPE, read_run_file, read_run_recipe
from firecaffe.runs.schemas import Values
from firecaffe.schema import checked
from firecaffe.user_code import wherever


class Finished(TypedDict):
    world_size: int
    exchange: str
    route: str
    data: str
    steps: int
    images_per_s: float
    exposed_communication: float
    weights_sha256: str


class ComparedModel(TypedDict):
    name: str


class ComparedTrain(TypedDict):
    global_batch_size: int


class ComparedSolver(TypedDict):
    base_lr: float


class ComparedWords(TypedDict):
    model: ComparedModel
    train: ComparedTrain
    solver: ComparedSolver


ENVIRONMENT = (
    *("host", "cpu", "cores", "cpu_capability", "gpus"),
    *("torch", "cuda", "firecaffe", "commit", "source"),
)

OWN_CODE = "environment.own_code."
"""The prefix of the names that identify a user's own code, by the recipe's section."""

HOW_READ = (
    *("data.name", "data.decode_threads", "data.cache", "data.cache_bytes", "data.order"),
    "data.hold_out",
)
"""Entries of [data] that change no image, or whose effect the data's description states."""

TASK_WORDS = {
    "task.name": "classification",
    "task.args": {},
    "task.label_smoothing": 0.0,
    "task.class_weights": [],
}
"""Entries of [task] that decide what is learned, with the defaults for runs older than tasks."""


MODEL_WORDS = ("name", "args", "weights", "freeze", "low_rank")
"""Entries that define a network and its start. Older runs may lack those that are empty."""


@dataclass(frozen=True)
class TableRun:
    folder: Path
    result: dict[str, Any]
    words: dict[str, Any]
    """The recipe by dotted name, without the places of files, and the facts of the environment."""

    @property
    def measure(self) -> Measure:
        return measure_of(self.result)

    @property
    def value(self) -> float:
        return self.measure.value_in(self.result)


@dataclass(frozen=True)
class RunRow:
    run: str
    workers: int
    exchange: str
    """The algorithm, with the route in brackets if another one was used in its place."""
    global_batch_size: int
    base_lr: float
    steps: int
    images_per_s: float
    speedup: float | None
    """Rate over the first run's; None if a rate is missing, a run failed, or the work differs."""
    other_work: list[str]
    exposed_communication: float
    measure: Measure
    value: float
    failure: str
    """Empty unless the run is known to have learned nothing."""
    weights_sha256: str


def read_run(folder: Path) -> TableRun:
    """Read a finished run. Raises RunError if the folder is not one or a file is damaged."""
    result = read_run_file(folder, "result.json")
    environment = read_run_file(folder, "environment.json")
    sections = read_run_recipe(folder)
    _check(folder / "result.json", result, Finished)
    _check(folder / RECIPE, sections, ComparedWords)
    _check_measure(folder / "result.json", result)
    settings = _words(sections)
    facts = {f"environment.{name}": environment.get(name) for name in ENVIRONMENT}
    for part, which in (environment.get("own_code") or {}).items():
        facts[OWN_CODE + part] = which
    if result.get("first_weights"):  # the same file, wherever it was
        settings["model.weights"] = f"sha256 {result['first_weights'].get('sha256')}"
    return TableRun(folder, result, settings | facts)


def rows(runs: Sequence[TableRun], allow_unequal: bool = False) -> list[RunRow]:
    """Return a row for each run. Speedups over the first run need equal work or `allow_unequal`."""
    return [
        RunRow(
            run=name,
            workers=run.result["world_size"],
            exchange=_exchange(run),
            global_batch_size=run.words["train.global_batch_size"],
            base_lr=run.words["solver.base_lr"],
            steps=run.result["steps"],
            images_per_s=run.result["images_per_s"],
            speedup=_speedup(runs[0], run, allow_unequal),
            other_work=other_work(runs[0], run),
            exposed_communication=run.result["exposed_communication"],
            measure=run.measure,
            value=run.value,
            failure=failure([run.result]),
            weights_sha256=run.result["weights_sha256"],
        )
        for name, run in zip(names(runs), runs, strict=True)
    ]


def names(runs: Sequence[TableRun]) -> list[str]:
    """Return the name of each run's folder, or `places` if two are equal."""
    short = [run.folder.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else places(runs)


def places(runs: Sequence[TableRun]) -> list[str]:
    """Return each run's path below the innermost folder that holds all of them."""
    folders = [run.folder.resolve() for run in runs]
    common = os.path.commonpath([folder.parent for folder in folders])
    return [folder.relative_to(common).as_posix() for folder in folders]


def differing_words(runs: Sequence[TableRun]) -> dict[str, list[Any]]:
    """Return every entry that differs between runs, with each run's value; None if it has none."""
    every = dict.fromkeys(word for run in runs for word in run.words)
    values = {word: [run.words.get(word) for run in runs] for word in every}
    return {
        word: of_runs for word, of_runs in values.items() if any(v != of_runs[0] for v in of_runs)
    }


def other_work(first: TableRun, run: TableRun) -> list[str]:
    """List how two runs' work differs. Batch and rate may: they are how the work is done."""
    work, other = _work(first), _work(run)
    unlike = [what for what in work if work[what] != other[what]]
    if other_epochs(first, run):
        unlike.append("samples seen")
    return unlike


def other_epochs(first: TableRun, run: TableRun) -> bool:
    """Whether the samples seen differ by a step or more. Trainings consist of whole steps."""
    step = max(one.words["train.global_batch_size"] for one in (first, run))
    return bool(abs(samples_seen(first) - samples_seen(run)) >= step)


def samples_seen(run: TableRun) -> int:
    in_whole_steps = run.result["steps"] * run.words["train.global_batch_size"]
    return int(run.result.get("samples_seen", in_whole_steps))


def doubts(runs: Sequence[TableRun]) -> dict[str, list[str]]:
    stated = {
        name: run.result.get("identity_doubts") for name, run in zip(names(runs), runs, strict=True)
    }
    return {name: list(map(str, reasons)) for name, reasons in stated.items() if reasons}


def partly_timed(runs: Sequence[TableRun]) -> list[str]:
    """Return a line for each run that was resumed or restarted: rate and workers are the last."""
    return [
        f"rate and workers of {name} are those of the last {run.result['timed_samples']:,} of "
        f"{samples_seen(run):,} samples, after a resume or restart"
        for name, run in zip(names(runs), runs, strict=True)
        if run.result.get("resumed_from") and "timed_samples" in run.result
    ]


def other_measures(runs: Sequence[TableRun]) -> list[str]:
    named = zip(names(runs), runs, strict=True)
    return unlike_measures({name: run.result for name, run in named})


def weights_identical(runs: Sequence[TableRun]) -> bool:
    return len({run.result["weights_sha256"] for run in runs}) <= 1


def _work(run: TableRun) -> dict[str, Any]:
    images = {
        word: value
        for word, value in run.words.items()
        if word.startswith("data.") and word not in HOW_READ
    }
    return {
        "data": run.result["data"],
        "augmentation": images,
        "model": {word: run.words.get(f"model.{word}") or None for word in MODEL_WORDS},
        "task": {word: run.words.get(word, value) for word, value in TASK_WORDS.items()},
    }


def _exchange(run: TableRun) -> str:
    algorithm, route = run.result["exchange"], run.result["route"]
    return algorithm if route == algorithm else f"{algorithm} ({route})"


def _speedup(first: TableRun, run: TableRun, allow_unequal: bool) -> float | None:
    if (other_work(first, run) and not allow_unequal) or failure([first.result, run.result]):
        return None
    rate, base = run.result["images_per_s"], first.result["images_per_s"]
    return rate / base if rate and base else None


def _words(sections: dict[str, Any]) -> dict[str, Any]:
    settings = {
        f"{section}.{word}": wherever(f"{section}.{word}", value)
        for section, entries in sections.items()
        if isinstance(entries, dict) and section != "run"
        for word, value in entries.items()
        if word != "path"
    }
    # Older runs record one epoch next to their steps, which had no effect.
    if "train.epochs" in settings:
        settings["train.epochs"] = (
            0 if settings.get("train.steps") else settings["train.epochs"] or 1
        )
    return settings


def _check_measure(path: Path, result: dict[str, Any]) -> None:
    measure = measure_of(result)
    name = "test_loss" if measure == LOSS else measure.name
    if name not in result:
        raise RunError(f"{path}: has no {name}; this is no record of a finished run")
    metrics = {
        metric: result[metric] for metric in (name, *result.get("metrics", ())) if metric in result
    }
    _check(path, metrics, Values)


def _check(path: Path, content: dict[str, Any], needed: type[Any]) -> None:
    try:
        checked(content, needed)
    except ValueError as error:
        raise RunError(f"{path}: {error}; this is no record of a finished run") from error
