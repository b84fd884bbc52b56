"""Convert a prediction and its target to one shape, for losses and metrics of regression."""

from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.outputs import prediction_of


def aligned(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return prediction and target in one shape and type, or raise RecipeError.

    (B, 1) and (B,) are made equal, as torch would broadcast them to (B, B).
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
    """Return both in float64 as (B,), or as (B, columns) if samples have several numbers."""
    prediction, target = aligned(outputs, targets)
    rows = (len(prediction), -1) if prediction.ndim == 2 and prediction.shape[1] > 1 else (-1,)
    return prediction.to(torch.float64).reshape(rows), target.to(torch.float64).reshape(rows)


def flat(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return all numbers of both in float64, in one dimension."""
    prediction, target = in_float64(outputs, targets)
    return prediction.flatten(), target.flatten()
