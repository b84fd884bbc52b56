"""`firecaffe.evaluate`: a run's network on its test data, or on other data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import check_count
from firecaffe.api.run_argument import RunInUse, open_run
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.process_settings import alone_in_process
from firecaffe.cluster.world import World, is_launched, join
from firecaffe.data import Data, num_classes, open_test
from firecaffe.files import finite
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.script.launch import launch
from firecaffe.tasks import Task, task_of
from firecaffe.training import evaluation
from firecaffe.training.checkpoint import best_step
from firecaffe.training.data_workers import data_workers
from firecaffe.training.evaluation import Evaluation
from firecaffe.training.forward import arithmetic
from firecaffe.training.load import Trained, load_run
from firecaffe.training.named import check_named
from firecaffe.training.prediction import labels_of_run
from firecaffe.training.records import in_words
from firecaffe.training.run_facts import About

NEEDED = ("model", "data", "task")
"""The sections of a recipe that say what is evaluated, and how."""


@dataclass(frozen=True)
class EvaluatedRun:
    trained: Trained
    data: Data
    evaluation: Evaluation


def evaluate_run(where: Path, recipe: Recipe, world: World, *, best: bool = False) -> EvaluatedRun:
    """Evaluate a run's network on the recipe's test data. All ranks call it and return the same."""
    check_named(where, recipe, NEEDED)
    with alone_in_process("evaluate"), arithmetic(recipe.train, world.device):
        trained = load_run(where, best=best, recipe=recipe)
        data = open_test(recipe.data)
        task = task_of_run(trained.about, recipe, data)
        labels = labels_of_run(trained.about, data, recipe.data)
        model = trained.model.to(world.device)
        with data_workers(data):
            given = model, task, data.test, recipe.data, recipe.train, world, labels
            evaluated = evaluation.evaluate(*given)
    return EvaluatedRun(trained, data, evaluated)


def task_of_run(about: About, recipe: Recipe, data: Data) -> Task:
    """Return the run's task, for the classes that it was trained on. Raises: RecipeError."""
    classes = num_classes(data.train) if about.num_classes is None else about.num_classes
    return task_of(recipe.task, classes)


@dataclass(frozen=True, repr=False)
class Evaluated(Answer):
    """The loss and metrics of a run's network on test data."""

    run: Path
    """The run, as it was given."""
    step: int | None
    """The step of the weights; None for a file."""
    evaluated: str
    """The weights: "weights", or "ema", their moving average."""
    best: bool
    """Whether the best checkpoint was asked for."""
    best_step: int | None
    """The step of the best checkpoint, if the run keeps one."""
    data: str
    """The data, in words."""
    evaluation: Evaluation
    """The loss, the metrics and the number of samples."""
    notes: Sequence[str]
    """Lines about newer checkpoints that are damaged."""

    def to_dict(self) -> dict[str, Any]:
        """Return the loss and each metric by name, with what they are of."""
        row = {
            "run": str(self.run),
            "step": self.step,
            "evaluated": self.evaluated,
            "best": self.best,
            "best_step": self.best_step,
            "data": self.data,
            **self.evaluation.row,
            "metrics": list(self.evaluation.metrics),
        }
        finite_row: dict[str, Any] = finite(row)
        return finite_row

    def _parts(self) -> Iterator[str]:
        which = " (moving average)" if self.evaluated == "ema" else ""
        at = "" if self.step is None else f" at step {self.step}"
        result = self.evaluation
        yield self.data
        yield (
            f"{self.run}  test{at}{which}: {in_words(result.metrics, result.shares)}"
            f"loss {result.loss:.4f} ({result.samples:,} samples)"
        )
        if self.best_step is None or self.step is None:
            return
        if self.best:
            yield (
                "these weights were the best on the validation samples; without "
                f"{option('best')} it takes the newest"
            )
        elif self.best_step != self.step:
            yield (
                f"these weights are the newest; {option('best')} takes those that were the best "
                f"on the validation samples, of step {self.best_step}"
            )


@from_script
def evaluate(
    run: str | Path,
    *,
    best: bool = False,
    trust_code: bool = False,
    nproc_per_node: int = 1,
    replace: Mapping[str, Any] | None = None,
) -> Evaluated:
    """Evaluate a run's network on its test data, or on other data.

    Args:
        run: A run's folder, a checkpoint in it, or a .fcz file.
        best: Take the best checkpoint, not the newest.
        trust_code: Run code that the folder or the file names.
        nproc_per_node: The number of processes to start on this host. In a launcher's world, each
            rank calls it and has the same answer.
        replace: Words of the run's recipe with other values, as {"data.path": "new"}.

    Raises: RecipeError, RunError, DataError, CheckpointError; what ends a process that was started
    is a RankFailedError.
    """
    used = open_run(run, replace, trust_code)
    check_count("nproc_per_node", nproc_per_node, 1)
    if is_launched() or nproc_per_node == 1:
        return _evaluate(used, best)
    # Once before any rank is started, so that a mistake is reported once.
    check_named(used.where, used.recipe, NEEDED)
    trained = load_run(used.where, best=best, recipe=used.recipe)
    data = open_test(used.recipe.data)
    data.test.batch(torch.tensor([0]))
    task_of_run(trained.about, used.recipe, data)
    labels_of_run(trained.about, data, used.recipe.data)
    return launch(_evaluate, nproc_per_node, (used, best))


def _evaluate(used: RunInUse, best: bool) -> Evaluated:
    exchange = used.recipe.exchange
    with join(used.recipe.train.device, exchange.timeout_s, exchange.silent_s) as world:
        result = evaluate_run(used.where, used.recipe, world, best=best)
    trained = result.trained
    return Evaluated(
        run=used.where,
        step=trained.step,
        evaluated=trained.evaluated,
        best=best,
        best_step=best_step(used.where),
        data=result.data.description,
        evaluation=result.evaluation,
        notes=trained.notes,
    )
