"""Checks of what a recipe asks of its model, its data and the ranks, before the first step."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from firecaffe.data import (
    Batches,
    Data,
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
from firecaffe.solvers.policy import batch_scale, learning_rate
from firecaffe.tasks import Task
from firecaffe.training.check_task import check_learnable, check_prediction, check_shapes
from firecaffe.training.evaluate import evaluating
from firecaffe.training.forward import Forward, laid_out
from firecaffe.words import LARGEST


def check_input(model: nn.Module, task: Task, recipe: Recipe, dataset: Dataset) -> None:
    """Runs shapes through a model, on the meta device if it is there.

    Raises: RecipeError if the model does not take the data's images, or the task its outputs;
    OwnCodeError if the model is a user's.
    """
    layout = given_layout(dataset, recipe.data)
    device = next(model.parameters()).device.type
    inputs, targets = layout.zeros(recipe.train.micro_batch_size if device == "meta" else 1, device)
    try:
        outputs = model.eval()(inputs)
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
    dataset: Dataset,
    is_own: bool,
    outputs_of: Callable[[Any], Any] | None = None,
) -> None:
    """Runs one sample of evaluation, and the shortest micro-batch of an epoch if it has one sample.
    is_own: whether the loss or the task was given to `firecaffe.train`. outputs_of: what gives the
    network's outputs, None where another rank has them; without it a call of the network.

    Raises: RecipeError if the network does not take the images, or has a BatchNorm that cannot be
    computed over one sample; or if the task does not take the outputs, or cannot be trained on.
    """
    model = forward.model
    outputs_of = outputs_of or model
    inputs, targets = map_batch(_first_row, batches.train_batch(0, 0))
    inputs = laid_out(inputs, forward.config)
    try:
        with evaluating(model):
            outputs = outputs_of(inputs)
        with torch.no_grad():
            if len(dataset) % recipe.train.micro_batch_size == 1:
                forward.buffers.begin_step()
                outputs_of(inputs)
                forward.buffers.begin_micro_batch()
    except Exception as error:
        shape = _shape_words(inputs)
        what = f"{shape}, which an epoch of {len(dataset)} samples ends with or an evaluation may"
        raise _not_taken(recipe, what, error) from error
    if outputs is None:
        return
    check_prediction(forward.task, outputs, recipe)
    check_learnable(forward.task, outputs, targets, recipe, is_own)


def _first_row(tensor: Tensor) -> Tensor:
    return tensor[:1]


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


def check_validation(recipe: Recipe, data: Data) -> None:
    """Checks `train.eval_every`. Raises: RecipeError if evaluations on the way have no samples
    of their own.
    """
    every = recipe.train.eval_every
    if every and data.validation is None:
        raise RecipeError(
            f"train.eval_every is {every}, but there are no validation samples, and the "
            "test samples are seen once, at the end; set data.hold_out, as to 0.1, or leave "
            "train.eval_every out"
        )


def check_rates(recipe: Recipe, steps: int) -> None:
    """Checks the rates. Raises: RecipeError if the first or the last learning rate, or a layer's
    share of it or of the weight decay, is not possible.
    """
    solver = recipe.solver
    scale = batch_scale(solver, recipe.train.global_batch_size)
    highest = max(0, min(round(solver.pct_start * steps), steps) - 1)  # of one_cycle
    rate = max(learning_rate(solver, step, steps, scale) for step in (0, highest, steps - 1))
    for what, value, mults in (
        (f"the learning rate of solver.base_lr {solver.base_lr:g}", rate, solver.lr_mult),
        (f"solver.weight_decay {solver.weight_decay:g}", solver.weight_decay, solver.decay_mult),
    ):
        most = value * max(mults.values(), default=1.0)
        if not most <= LARGEST:
            raise RecipeError(
                f"{what} comes to {most:g}; it must be at most {LARGEST:.2g}, the largest float32"
            )


def check_coded(recipe: Recipe, named: Mapping[str, nn.Parameter], has_hook: bool) -> None:
    """Checks a compressor. Raises: RecipeError if the gradients cannot be encoded."""
    compressor = recipe.exchange.compressor
    if has_hook:
        raise RecipeError(
            f"exchange.compressor {compressor} and comm_hook both take the gradients; use one"
        )
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise RecipeError(
                f"exchange.compressor {compressor} encodes float32; {name} is {parameter.dtype}"
            )
