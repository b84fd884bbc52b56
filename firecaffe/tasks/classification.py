"""Classification: cross entropy; how often the label is first, and among the first five."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.models.model import AUX_WEIGHT
from firecaffe.tasks.config import TaskConfig
from firecaffe.tasks.metrics import EXACT, PLACES, chosen, count_correct
from firecaffe.tasks.outputs import own_loss, part_of, prediction_of
from firecaffe.tasks.task import Counts, Known, Task, class_weights

AUX_HEADS = ("aux2", "aux1", "aux_logits2", "aux_logits1", "aux_logits")
"""Names of auxiliary heads in our networks and in torchvision's GoogLeNet and Inception."""


def classification(config: TaskConfig, num_classes: int | None) -> Task:
    """Make the task. Targets are int64 (B,); outputs are logits (B, classes), or several outputs.

    The loss of each auxiliary head is added with the factor AUX_WEIGHT.
    """
    known = Known(num_classes)
    weights = class_weights(config, known)
    smoothing = config.label_smoothing

    def entropy(logits: Tensor, labels: Tensor) -> Tensor:
        try:
            if weights is None:
                return F.cross_entropy(logits, labels, label_smoothing=smoothing)
            losses = F.cross_entropy(
                logits, labels, weights.to(logits), label_smoothing=smoothing, reduction="none"
            )
        except IndexError as error:
            if "out of bounds" not in str(error):
                raise
            raise _no_output(logits, labels) from error
        return losses.mean()  # over samples, not weights, so micro-batches count equally

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        given = own_loss(outputs)
        if given is not None:
            if smoothing or weights is not None:
                raise RecipeError(
                    "task.label_smoothing and task.class_weights have no effect: the network "
                    "computes its loss itself; do not hand it the labels"
                )
            return given
        value = entropy(prediction_of(outputs), labels)
        for name in AUX_HEADS:
            head = part_of(outputs, name)
            if isinstance(head, Tensor):
                value = value + AUX_WEIGHT * entropy(head, labels)
        return value

    def wrong(outputs: Any) -> str:
        return wrong_logits(prediction_of(outputs), known.num_classes, "(samples, {})", ndim=2)

    # With five classes every label is among the first five. The number may also be unknown.
    counted = EXACT if num_classes is not None and num_classes > PLACES else EXACT[:1]
    return Task(
        loss,
        chosen(config, "classification", known, counted),
        config.metric,
        counts=Counts(counted, lambda *batch: count_correct(*batch)[: len(counted)]),
        classes=lambda labels: [int(label) for label in labels.tolist()],
        wrong=wrong,
    )


def _no_output(logits: Tensor, labels: Tensor) -> RecipeError:
    num_classes = logits.shape[1]
    sample = int(((labels < 0) | (labels >= num_classes)).nonzero()[0])
    return RecipeError(
        f"task.name classification: sample {sample} of a micro-batch has the class "
        f"{int(labels[sample])}; the network has outputs for 0 to {num_classes - 1}"
    )


def wrong_logits(logits: Tensor, num_classes: int | None, shape: str, ndim: int) -> str:
    """Say what is wrong with logits, whose classes are the second dimension; "" if nothing is."""
    if logits.ndim == ndim and logits.shape[1] >= (num_classes or 1):
        return ""
    expected = shape.format(num_classes or "classes")
    return f"outputs of {tuple(logits.shape)}; expected logits of {expected}"


CLASSIFICATION = classification(TaskConfig(), None)
"""The task of a recipe that names none."""
