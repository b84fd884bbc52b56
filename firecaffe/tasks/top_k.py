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
    places = min(PLACES, logits.shape[1])
    best = logits.topk(places).indices == labels[:, None]
    up_to_place = best.sum(0, dtype=torch.float32).cumsum(0)
    return up_to_place[:: places - 1] if places > 1 else up_to_place.expand(2)


def counted(place: int) -> Callable[[Any, Tensor], Tensor]:
    """One of the two counts."""
    return lambda outputs, labels: count_correct(outputs, labels)[place]
