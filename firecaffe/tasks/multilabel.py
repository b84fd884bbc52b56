"""Multilabel: samples that have each of several labels or not; binary cross entropy of each."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.classification import wrong_logits
from firecaffe.tasks.config import TaskConfig
from firecaffe.tasks.metrics import chosen
from firecaffe.tasks.outputs import own_loss, prediction_of
from firecaffe.tasks.task import Known, Task, class_weights


def multilabel(config: TaskConfig, num_classes: int | None) -> Task:
    """Make the task. Targets are 0 or 1, (B, labels); outputs are logits (B, labels).

    The loss is the mean over samples and labels. `class_weights` weight samples with the label.
    """
    known = Known(num_classes)
    weights = class_weights(config, known)

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        given = own_loss(outputs)
        if given is not None and weights is None:
            return given
        logits = prediction_of(outputs)
        if logits.shape != targets.shape:
            raise RecipeError(
                f"task.name multilabel takes targets of the logits' shape, {tuple(logits.shape)}, "
                f"0 or 1 each; found {tuple(targets.shape)}"
            )
        of_positives = None if weights is None else weights.to(logits)
        return F.binary_cross_entropy_with_logits(
            logits, targets.to(logits.dtype), pos_weight=of_positives
        )

    def wrong(outputs: Any) -> str:
        return wrong_logits(prediction_of(outputs), known.num_classes, "(samples, {})", ndim=2)

    metrics = chosen(config, "multilabel", known, ("f1", "exact_match"))
    return Task(loss, metrics, config.metric, wrong=wrong)
