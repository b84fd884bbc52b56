"""Images of classes: cross entropy; how often the label is first, and among the first five."""

from typing import Any

import torch
from torch import Tensor

from firecaffe.models import classification_loss
from firecaffe.tasks.task import Task


def count_correct(outputs: Any, labels: Tensor) -> Tensor:
    """Counts the samples with their label first, and among the first five: float32, shape (2,)."""
    logits = logits_of(outputs)
    best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    by_place = best.sum(0, dtype=torch.float32)
    return torch.stack([by_place[0], by_place.sum()])


def logits_of(outputs: Any) -> Tensor:
    """The outputs, or the first of several, as a network with heads gives them."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
    return logits


def classes(labels: Tensor) -> list[int]:
    return [int(label) for label in labels.tolist()]


CLASSIFICATION = Task(classification_loss, ("top1", "top5"), count_correct, classes)
