"""Finds the prediction and the loss in a network's outputs, in the target's shape."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.user_code import shown

NAMES = ("logits", "out")
"""Names of the prediction: Hugging Face's (`ModelOutput`) and torchvision's for segmentation."""


def prediction_of(outputs: Any) -> Tensor:
    """Return the output, a named one, or the first of several. Raises RecipeError if none fits."""
    if isinstance(outputs, Tensor):
        return outputs
    for name in NAMES:
        prediction = part_of(outputs, name)
        if isinstance(prediction, Tensor):
            return prediction
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise RecipeError(
        f"the network gives {shown(outputs)}; expected a tensor, a dict with one of "
        f"{', '.join(NAMES)}, or a tuple that begins with the prediction"
    )


def part_of(outputs: Any, name: str) -> Any:
    if isinstance(outputs, Tensor):
        return None
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def own_loss(outputs: Any) -> Tensor | None:
    """Return the loss if the network computes it, as Hugging Face's do if they receive labels."""
    loss = part_of(outputs, "loss")
    return loss if isinstance(loss, Tensor) else None


def aligned(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return prediction and target in one shape and type, or raise RecipeError.

    (B, 1) and (B,) are made equal, because torch would broadcast them to (B, B).
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
    """Return prediction and target in float64: (B,), or (B, columns) for several numbers each."""
    prediction, target = aligned(outputs, targets)
    rows = (len(prediction), -1) if prediction.ndim == 2 and prediction.shape[1] > 1 else (-1,)
    return prediction.to(torch.float64).reshape(rows), target.to(torch.float64).reshape(rows)


def flat(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return all numbers of prediction and target in float64, in one dimension."""
    prediction, target = in_float64(outputs, targets)
    return prediction.flatten(), target.flatten()
