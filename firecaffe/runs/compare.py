"""Finished runs side by side: what each came to, what differs between them, whether it was fair.

The rows are those of FireCaffe's table 2 (Iandola et al. 2016, arXiv 1511.00175), which asks of
whoever reports a speedup the same work, the accuracy beside the rate, and all hyperparameters.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from firecaffe.errors import RunError
from firecaffe.reference import wherever
from firecaffe.runs.folder import RECIPE, read_run_file, read_run_recipe
from firecaffe.runs.learned import failure
from firecaffe.runs.measure import LOSS, Measure, measure_of, unlike_measures
from firecaffe.runs.schemas import Values
from firecaffe.schema import checked


class Finished(TypedDict):
    """What a comparison cannot do without in result.json."""

    world_size: int
    exchange: str
    route: str
    data: str
    steps: int
    images_per_s: float
    exposed_communication: float
    weights_sha256: str


class ComparedModel(TypedDict):
    """The same in a recipe's model."""

    name: str


class ComparedTrain(TypedDict):
    """The same in a recipe's train."""

    global_batch_size: int


class ComparedSolver(TypedDict):
    """The same in a recipe's solver."""

    base_lr: float


class Compared(TypedDict):
    """The same in recipe.toml."""

    model: ComparedModel
    train: ComparedTrain
    solver: ComparedSolver


ENVIRONMENT = (
    *("host", "cpu", "cores", "cpu_capability", "gpus"),
    *("torch", "cuda", "firecaffe", "commit", "source"),
)
"""What a comparison takes from environment.json, as environment.FACT."""

OWN_CODE = "environment.own_code."
"""What the words begin with that tell a user's code from other code, by the recipe's section."""

HOW_READ = (
    *("data.name", "data.decode_threads", "data.cache", "data.cache_bytes", "data.order"),
    "data.hold_out",
)
"""Words of the data that change none of its images; or which, as the data's own line says."""

TASK_WORDS = {
    "task.name": "classification",
    "task.args": {},
    "task.label_smoothing": 0.0,
    "task.class_weights": [],
}
"""Words of the task that decide what is learned, with what runs did before there were tasks."""


MODEL_WORDS = ("name", "args", "weights", "freeze", "low_rank")
"""Words of which a network and its start are made; what is empty may not be there in older runs."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    result: dict[str, Any]
    words: dict[str, Any]
    """The recipe by dotted name, without what says only where things lie, and the environment."""

    @property
    def measure(self) -> Measure:
        """The metric that it is judged by."""
        return measure_of(self.result)

    @property
    def value(self) -> float:
        """That of the metric, on the test samples."""
        return self.measure.value_in(self.result)


@dataclass(frozen=True)
class Row:
    """A run's row of the table. Fractions are of 1."""

    run: str
    workers: int
    exchange: str
    """The algorithm, and the route in brackets if another stood in for it."""
    global_batch_size: int
    base_lr: float
    steps: int
    images_per_s: float
    speedup: float | None
    """Images/s over the first run's; None if one of them measured no rate, learned nothing, or
    did other work.
    """
    other_work: list[str]
    """What the run did otherwise than the first one, if its work was not the same."""
    exposed_communication: float
    measure: Measure
    """The metric that the run is judged by."""
    value: float
    """That of the metric, on the test samples."""
    failure: str
    """Empty unless the run is known to have learned nothing."""
    weights_sha256: str


def read_run(folder: Path) -> Run:
    """Reads a run's result, recipe and environment.

    Raises: RunError if the folder is no finished run or a file is damaged.
    """
    result = read_run_file(folder, "result.json")
    environment = read_run_file(folder, "environment.json")
    sections = read_run_recipe(folder)
    _check(folder / "result.json", result, Finished)
    _check(folder / RECIPE, sections, Compared)
    _check_measure(folder / "result.json", result)
    words = _words(sections)
    facts = {f"environment.{name}": environment.get(name) for name in ENVIRONMENT}
    for part, which in (environment.get("own_code") or {}).items():
        facts[OWN_CODE + part] = which
    if result.get("first_weights"):  # the same file, wherever it was
        words["model.weights"] = f"sha256 {result['first_weights'].get('sha256')}"
    return Run(folder, result, words | facts)


def rows(runs: Sequence[Run], allow_unequal: bool = False) -> list[Row]:
    """The table's rows, in the order given; speedups are against the first run, and only of the
    same work unless others are allowed.
    """
    return [
        Row(
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


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its folder's name, or where it lies, if two have the same."""
    short = [run.folder.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else places(runs)


def places(runs: Sequence[Run]) -> list[str]:
    """Where each run lies below the innermost folder that holds them all."""
    folders = [run.folder.resolve() for run in runs]
    common = os.path.commonpath([folder.parent for folder in folders])
    return [folder.relative_to(common).as_posix() for folder in folders]


def differing_words(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Every word that is not the same in all runs, with each run's value; None: it has none."""
    every = dict.fromkeys(word for run in runs for word in run.words)
    values = {word: [run.words.get(word) for run in runs] for word in every}
    return {word: each for word, each in values.items() if any(v != each[0] for v in each)}


def other_work(first: Run, run: Run) -> list[str]:
    """What makes the work of two runs unequal: data, augmentation, model, samples seen.

    The batch and the rate are how the work is done; as many samples of the same data is what.
    """
    work, other = _work(first), _work(run)
    unlike = [what for what in work if work[what] != other[what]]
    if other_epochs(first, run):
        unlike.append("samples seen")
    return unlike


def other_epochs(first: Run, run: Run) -> bool:
    """Whether one run saw a step of samples more, or more steps: trainings are whole steps."""
    step = max(each.words["train.global_batch_size"] for each in (first, run))
    return bool(abs(samples_seen(first) - samples_seen(run)) >= step)


def samples_seen(run: Run) -> int:
    """Training samples that a run saw, each counted as often as it was seen."""
    in_whole_steps = run.result["steps"] * run.words["train.global_batch_size"]
    return int(run.result.get("samples_seen", in_whole_steps))


def doubts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What the runs themselves doubt of their bits, by their names."""
    stated = {
        name: run.result.get("identity_doubts") for name, run in zip(names(runs), runs, strict=True)
    }
    return {name: list(map(str, own)) for name, own in stated.items() if own}


def other_measures(runs: Sequence[Run]) -> list[str]:
    """A line for each run that is judged by another metric than the first."""
    named = zip(names(runs), runs, strict=True)
    return unlike_measures({name: run.result for name, run in named})


def weights_identical(runs: Sequence[Run]) -> bool:
    """Whether all runs ended with the same parameters and buffers, bit for bit."""
    return len({run.result["weights_sha256"] for run in runs}) <= 1


def _work(run: Run) -> dict[str, Any]:
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


def _exchange(run: Run) -> str:
    algorithm, route = run.result["exchange"], run.result["route"]
    return algorithm if route == algorithm else f"{algorithm} ({route})"


def _speedup(first: Run, run: Run, allow_unequal: bool) -> float | None:
    if (other_work(first, run) and not allow_unequal) or failure([first.result, run.result]):
        return None
    rate, base = run.result["images_per_s"], first.result["images_per_s"]
    return rate / base if rate and base else None


def _words(sections: dict[str, Any]) -> dict[str, Any]:
    found = {
        f"{section}.{word}": wherever(f"{section}.{word}", value)
        for section, words in sections.items()
        if isinstance(words, dict) and section != "run"
        for word, value in words.items()
        if word != "path"
    }
    # Older runs say one epoch beside their steps, which meant nothing.
    if "train.epochs" in found:
        found["train.epochs"] = 0 if found.get("train.steps") else found["train.epochs"] or 1
    return found


def _check_measure(path: Path, result: dict[str, Any]) -> None:
    """Raises: RunError if the value of the metric that the run is judged by is not there."""
    measure = measure_of(result)
    name = "test_loss" if measure == LOSS else measure.name
    if name not in result:
        raise RunError(f"{path}: has no {name}; this is no record of a finished run")
    metrics = {each: result[each] for each in (name, *result.get("metrics", ())) if each in result}
    _check(path, metrics, Values)


def _check(path: Path, found: dict[str, Any], needed: type[Any]) -> None:
    try:
        checked(found, needed)
    except ValueError as error:
        raise RunError(f"{path}: {error}; this is no record of a finished run") from error
