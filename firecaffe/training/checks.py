"""Checks of what a recipe asks of its model, its data and the ranks, before the first step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from firecaffe.data import (
    Batches,
    Dataset,
    Layout,
    given_layout,
    is_images,
)
from firecaffe.data.layout import leaf_of, map_batch, tree_words
from firecaffe.errors import RecipeError
from firecaffe.models import MODELS
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import failed
from firecaffe.tasks import Task
from firecaffe.training.check_task import (
    check_learnable,
    check_metrics,
    check_prediction,
    check_shapes,
)
from firecaffe.training.evaluate import evaluating
from firecaffe.training.forward import Forward, laid_out


def check_input(model: nn.Module, task: Task, recipe: Recipe, dataset: Dataset) -> None:
    """Runs shapes through a model, on the meta device if it is there.

    Raises: RecipeError if the model does not take the data's images, or the task its outputs;
    OwnCodeError if the model is a user's.
    """
    layout = given_layout(dataset, recipe.data)
    device = next(model.parameters()).device.type
    inputs, targets = layout.zeros(recipe.train.micro_batch_size if device == "meta" else 1, device)
    try:
        with evaluating(model):
            outputs = model(inputs)
    except Exception as error:
        what = f"{samples_words(dataset, layout)} (data.name {recipe.data.name!r})"
        raise _not_taken(recipe, what, error) from error
    check_shapes(task, outputs, targets, recipe)


def _not_taken(recipe: Recipe, what: str, error: Exception) -> RecipeError:
    """Makes the line about a network that has raised; a user's keeps its traceback."""
    said = f"model.name {recipe.model.name!r} does not take {what}"
    if recipe.model.name in MODELS:
        return RecipeError(f"{said}: {_first_line(error)}")
    return failed(f"{said}: it", error)


def check_outputs(
    forward: Forward,
    batches: Batches,
    recipe: Recipe,
    is_own: bool,
    outputs_of: Callable[[Any], Any] | None = None,
) -> None:
    """Runs one sample in evaluation, and the shortest micro-batch in training: one of two samples,
    of one if an epoch has that. is_own: whether the loss or the task was given to
    `firecaffe.train`. outputs_of: what gives the network's outputs, None where another rank has
    them; without it a call of the network.

    Raises: RecipeError if the network does not take the images, or has a BatchNorm that cannot be
    computed over one sample; or if the task does not take the outputs, or cannot be trained on.
    """
    model, config, dataset = forward.model, recipe.train, batches.dataset
    outputs_of = outputs_of or model
    is_one = len(dataset) % config.micro_batch_size == 1
    rest = 1 if is_one else min(2, config.micro_batch_size)
    batch = batches.train_batch(0, 0)
    inputs, one = map_batch(lambda tensor: tensor[:1], batch)
    shortest, targets = map_batch(lambda tensor: tensor[:rest], batch)
    inputs, shortest = laid_out(inputs, config), laid_out(shortest, config)
    forward.begin_step()
    try:
        with evaluating(model), torch.no_grad():
            outputs = outputs_of(inputs)
    except Exception as error:
        what = f"{_shape_words(inputs)}, which an evaluation may end with"
        raise _not_taken(recipe, what, error) from error
    forward.buffers.begin_micro_batch()
    try:
        trained = outputs_of(shortest)
    except Exception as error:
        what = _shape_words(shortest)
        if is_one:
            what += (
                f", which an epoch of {len(dataset)} samples ends with (a train.micro_batch_size "
                f"that does not leave 1 of {len(dataset)} helps, or a sample more or less)"
            )
        raise _not_taken(recipe, what, error) from error
    forward.buffers.begin_micro_batch()
    if outputs is not None:
        check_prediction(forward.task, outputs, recipe)
        check_metrics(forward.task, outputs, one, recipe, is_own)
    if trained is not None:
        check_learnable(forward.task, trained, targets, recipe, is_own)


def _shape_words(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return "x".join(map(str, inputs.shape))
    return f"one sample of {tree_words(tree_map(leaf_of, inputs))}"


def samples_words(dataset: Dataset, layout: Layout) -> str:
    """What a network is given, in a line."""
    if is_images(dataset):
        return f"images of {'x'.join(map(str, layout.inputs.shape))}"
    return f"inputs of {tree_words(layout.inputs)}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_coded(recipe: Recipe, named: Mapping[str, nn.Parameter]) -> None:
    """Checks a compressor. Raises: RecipeError if the gradients cannot be encoded."""
    compressor = recipe.exchange.compressor
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise RecipeError(
                f"exchange.compressor {compressor} encodes float32; {name} is {parameter.dtype}"
            )
