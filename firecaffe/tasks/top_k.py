"""How many samples have their label first, or among the first few: exact counts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firecaffe.tasks.outputs import prediction_of

PLACES = 5
"""The first few."""


def count_correct(outputs: Any, labels: Tensor) -> Tensor:
    """How many samples have their label first, and among the first five: float32, shape (2,)."""
    logits = prediction_of(outputs)
    best = logits.topk(min(PLACES, logits.shape[1])).indices == labels[:, None]
    by_place = best.sum(0, dtype=torch.float32)
    return torch.stack([by_place[0], by_place.sum()])


def counted(place: int) -> Callable[[Any, Tensor], Tensor]:
    """One of the two counts."""
    return lambda outputs, labels: count_correct(outputs, labels)[place]
