"""Checks of a task before the first step: its loss and metrics, on what the network gives."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.inventory.loss_trial import check_reduction
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import failed, is_reference, shown
from firecaffe.tasks import Task
from firecaffe.tasks.metric import Metric


def check_prediction(task: Task, outputs: Any, recipe: Recipe) -> None:
    """Looks at the shape of what the network gives, with values or on the meta device.

    Raises: RecipeError if the task does not take it.
    """
    network = f"model.name {recipe.model.name!r}"
    try:
        wrong = "" if task.wrong is None else task.wrong(outputs)
    except RecipeError as error:
        raise RecipeError(f"{network}: {error}") from None
    if wrong:
        raise RecipeError(f"{network} gives {wrong}")


def check_shapes(task: Task, outputs: Any, targets: Any, recipe: Recipe) -> None:
    """Looks at shapes before any rank is started; targets: zeros, or on the meta device.

    Raises: RecipeError if a task of ours does not take them. What else the loss raises says nothing
    yet: a user's own may need values.
    """
    check_prediction(task, outputs, recipe)
    if is_reference(recipe.task.name):
        return
    try:
        task.loss(outputs, targets)
    except RecipeError:
        raise
    except Exception:
        return


def check_learnable(task: Task, outputs: Any, targets: Any, recipe: Recipe, is_own: bool) -> None:
    """Asks for the loss of what the network gave in training. is_own: whether the loss or the task
    was given to `firecaffe.train`.

    Raises: RecipeError if it cannot be trained on; OwnCodeError for what a user's code raises.
    """
    word = f"{_whose(recipe, is_own)}loss"
    is_own = is_own or is_reference(recipe.task.name)
    check_reduction(word, task.loss)
    try:
        value = task.loss(outputs, targets)
    except RecipeError:
        raise
    except Exception as error:
        said = f"{word} does not take the network's outputs and {_kinds(targets)}"
        raise _failure(said, error, is_own) from error
    _check_value(word, value, outputs)


def check_metrics(task: Task, outputs: Any, targets: Any, recipe: Recipe, is_own: bool) -> None:
    """Asks for the metrics of one sample, of what the network gave in evaluation.

    Raises: RecipeError if a metric does not take it; OwnCodeError for what a user's code raises.
    """
    whose = _whose(recipe, is_own)
    is_own = is_own or is_reference(recipe.task.name)
    for name, metric in task.measured.items():
        word = f"{whose}metric {name!r}"
        try:
            _try(metric, outputs, targets)
        except OwnCodeError:
            raise
        except RecipeError as error:
            raise RecipeError(f"{word}: {error}") from error
        except Exception as error:
            said = f"{word} does not take the network's outputs and {_kinds(targets)}"
            raise _failure(said, error, is_own) from error


def _whose(recipe: Recipe, is_own: bool) -> str:
    return "" if is_own else f"task.name {recipe.task.name!r}: its "


def _check_value(word: str, value: Any, outputs: Any) -> None:
    if isinstance(value, tuple | list | dict):
        raise RecipeError(
            f"{word} gave a {type(value).__name__} of {len(value)}; expected one number. Add the "
            "losses, each with its weight; trainings of several losses and optimizers, as of GANs, "
            "are not supported"
        )
    # Of one sample a number for each is one number too: so no dimension at all.
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        found = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise RecipeError(
            f"{word} gave {found!s:.80}; expected one number, the mean of the samples"
        )
    if not value.requires_grad:
        raise RecipeError(
            f"{word} gave a number that knows no gradient; expected one that is computed from the "
            "network's outputs by torch (without item(), detach(), no_grad or argmax)"
        )
    if not value.isfinite() and all(bool(leaf.isfinite().all()) for leaf in _tensors(outputs)):
        raise RecipeError(
            f"{word} is {value.item()} for the first sample, before any step, though the network's "
            "outputs are finite"
        )


def _try(metric: Metric, outputs: Any, targets: Any) -> None:
    """Takes one sample. Of one alone a value may not be defined, which is no fault; but it must be
    one number.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of metrics that one sample is not enough for
        state = metric.of_batch(outputs, targets)
        try:
            metric.value(state, 1)
        except RecipeError:
            raise
        except Exception:
            return


def _failure(said: str, error: Exception, is_own: bool) -> RecipeError:
    if is_own:
        return failed(f"{said}: it", error)
    return RecipeError(f"{said}: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _kinds(targets: Any) -> str:
    """The targets, in a line about them."""
    each = [f"{tuple(leaf.shape)}, {leaf.dtype}" for leaf in _tensors(targets)]
    return f"targets of {'; '.join(each) or shown(targets)}"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
