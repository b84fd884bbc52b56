"""Find the prediction and the loss in a network's outputs."""

from collections.abc import Mapping
from typing import Any

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
