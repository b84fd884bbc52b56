"""Where the prediction is in what a network returns."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.reference import shown

NAMES = ("logits", "out")
"""What the prediction is called among several outputs: by Hugging Face (`ModelOutput`), and by
torchvision's networks for segmentation.
"""


def prediction_of(outputs: Any) -> Tensor:
    """The outputs, or the one of several that is the prediction: by its name, or the first.

    Raises: RecipeError if there is none.
    """
    if isinstance(outputs, Tensor):
        return outputs
    for name in NAMES:
        found = part_of(outputs, name)
        if isinstance(found, Tensor):
            return found
    if isinstance(outputs, tuple | list) and outputs and isinstance(outputs[0], Tensor):
        return outputs[0]
    raise RecipeError(
        f"the network gives {shown(outputs)}; expected a tensor, a dict with one of "
        f"{', '.join(NAMES)}, or a tuple that begins with the prediction"
    )


def part_of(outputs: Any, name: str) -> Any:
    """An output by its name; None if there is none."""
    if isinstance(outputs, Tensor):
        return None
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def own_loss(outputs: Any) -> Tensor | None:
    """The loss, if the network computes it itself, as those of Hugging Face do that are given
    labels.
    """
    found = part_of(outputs, "loss")
    return found if isinstance(found, Tensor) else None
