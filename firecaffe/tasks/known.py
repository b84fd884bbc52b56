"""What a task knows of its data and words, and how class weights are taken."""

from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.config import TaskConfig


@dataclass(frozen=True)
class Known:
    """num_classes: classes or labels of the data; None if the data do not say. ignore_index: the
    target that is left out; None if there is none.
    """

    num_classes: int | None = None
    ignore_index: int | None = None

    def classes(self) -> int:
        """Their number. Raises: RecipeError if nobody knows it."""
        if self.num_classes is None:
            raise RecipeError(
                "the data do not say how many classes there are; set "
                "task.args = { num_classes = N }"
            )
        return self.num_classes


def class_weights(config: TaskConfig, known: Known) -> Tensor | None:
    """float32 (classes,); None if there are none. Raises: RecipeError if not one for each class."""
    found = config.class_weights
    if not found:
        return None
    if known.num_classes is not None and len(found) != known.num_classes:
        raise RecipeError(
            f"task.class_weights has {len(found)} numbers; there are {known.num_classes} classes"
        )
    return torch.tensor(found)
