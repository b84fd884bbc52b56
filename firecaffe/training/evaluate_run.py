"""A run's network on test data, evaluated as the run itself does."""

from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.world import World
from firecaffe.data import Data, num_classes, open_test
from firecaffe.recipe.sections import Recipe
from firecaffe.tasks import Task, task_of
from firecaffe.training.data_workers import data_workers
from firecaffe.training.evaluation import Evaluation, evaluate
from firecaffe.training.forward import arithmetic
from firecaffe.training.load import Trained, load_run
from firecaffe.training.named import check_named
from firecaffe.training.prediction import labels_of_run
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
    with arithmetic(recipe.train, world.device):
        trained = load_run(where, best=best, recipe=recipe)
        data = open_test(recipe.data)
        task = task_of_run(trained.about, recipe, data)
        labels = labels_of_run(trained.about, data, recipe.data)
        model = trained.model.to(world.device)
        with data_workers(data):
            evaluation = evaluate(model, task, data.test, recipe.data, recipe.train, world, labels)
    return EvaluatedRun(trained, data, evaluation)


def task_of_run(about: About, recipe: Recipe, data: Data) -> Task:
    """Return the run's task, for the classes that it was trained on. Raises: RecipeError."""
    classes = num_classes(data.train) if about.num_classes is None else about.num_classes
    return task_of(recipe.task, classes)
