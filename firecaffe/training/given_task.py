"""A training's task: the one that the recipe names, or one given to `firecaffe.train`."""

from dataclasses import replace
from typing import Any

from torch import nn

from firecaffe.data import Dataset
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.tasks import Loss, Task, TaskConfig, task_of
from firecaffe.tasks.known_tasks import check_own
from firecaffe.tasks.over_samples import over_samples
from firecaffe.user_code import shown

OWN = "own task"
"""The name, in a record, of a task that was given in Python."""


def check_given(recipe: Recipe, loss: Any, task: Any) -> None:
    """Check the `loss` and the `task` of `firecaffe.train`. Raises: RecipeError."""
    if isinstance(loss, nn.Module) and any(
        parameter.requires_grad for parameter in loss.parameters()
    ):
        raise RecipeError(
            f"loss is {type(loss).__name__}, which has parameters, and the network's alone are "
            "trained; make them the network's, and let it return what the loss needs"
        )
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise RecipeError(
            f"loss is {shown(loss)}; expected a function of (outputs, labels), as "
            "torch.nn.CrossEntropyLoss() is"
        )
    if task is None:
        return
    if loss is not None:
        raise RecipeError("loss and task are both given; give the loss to the task: Task(loss, …)")
    if not isinstance(task, Task):
        raise RecipeError(f"task is {shown(task)}; expected a firecaffe.Task(loss, metrics={{…}})")
    if recipe.task not in (TaskConfig(), TaskConfig(OWN)):
        raise RecipeError("task is given, and the recipe has a [task] too; leave one out")
    check_own(task)


def task_for(recipe: Recipe, loss: Loss | None, task: Task | None, dataset: Dataset) -> Task:
    """Return a training's task. Raises: RecipeError; OwnCodeError for a user's errors."""
    if task is not None:
        return task
    named_task = task_of(recipe.task, getattr(dataset, "num_classes", None))
    return named_task if loss is None else replace(named_task, loss=over_samples(loss))
