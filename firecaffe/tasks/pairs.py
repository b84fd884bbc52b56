"""A prediction and its target brought to one shape, for losses and metrics of regression."""

from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.outputs import prediction_of


def aligned(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The prediction and the target, of one shape and type. (B, 1) and (B,) go together; torch
    would make (B, B) of them.

    Raises: RecipeError if they are not of one shape.
    """
    prediction = prediction_of(outputs)
    if prediction.shape == (*targets.shape, 1):
        prediction = prediction.squeeze(-1)
    elif targets.shape == (*prediction.shape, 1):
        targets = targets.squeeze(-1)
    if prediction.shape != targets.shape:
        raise RecipeError(
            f"task.name regression takes outputs of the targets' shape, {tuple(targets.shape)}; "
            f"found {tuple(prediction.shape)}"
        )
    return prediction, targets.to(prediction.dtype)


def in_float64(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, in columns: (B,), or (B, columns) of samples with several numbers."""
    prediction, target = aligned(outputs, targets)
    rows = (len(prediction), -1) if prediction.ndim == 2 and prediction.shape[1] > 1 else (-1,)
    return prediction.to(torch.float64).reshape(rows), target.to(torch.float64).reshape(rows)


def flat(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64, all numbers alike."""
    prediction, target = in_float64(outputs, targets)
    return prediction.flatten(), target.flatten()
