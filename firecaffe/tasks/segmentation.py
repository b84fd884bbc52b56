"""Segmentation: images with a class for each pixel; cross entropy of each pixel."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.tasks.classification import wrong_logits
from firecaffe.tasks.config import TaskConfig
from firecaffe.tasks.metrics import chosen
from firecaffe.tasks.outputs import own_loss, part_of, prediction_of
from firecaffe.tasks.task import Known, Task, class_weights

IGNORED = -100

AUX_WEIGHT = 0.5
"""The factor of the auxiliary head's loss in torchvision's own training."""


def segmentation(
    config: TaskConfig, num_classes: int | None, *, ignore_index: int = IGNORED
) -> Task:
    """Make the task. Targets are int64 (B, H, W); outputs are logits (B, classes, H, W).

    A sample's loss is the mean over its pixels that are not `ignore_index`, 0 if it has none. The
    loss of a micro-batch is the mean over its samples.
    """
    known = Known(num_classes, ignore_index)
    weights = class_weights(config, known)

    def entropy(logits: Tensor, targets: Tensor) -> Tensor:
        if (len(logits), *logits.shape[2:]) != tuple(targets.shape):
            raise RecipeError(
                "task.name segmentation takes targets of (samples, rows, columns), as large as the "
                f"logits; found {tuple(targets.shape)} for logits of {tuple(logits.shape)}"
            )
        check_classes(targets, logits.shape[1], ignore_index)
        pixels = F.cross_entropy(
            logits,
            targets.long(),
            None if weights is None else weights.to(logits),
            ignore_index=ignore_index,
            label_smoothing=config.label_smoothing,
            reduction="none",
        )
        counted = (targets != ignore_index).flatten(1).sum(1).clamp(min=1)
        return (pixels.flatten(1).sum(1) / counted).mean()

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        given = own_loss(outputs)
        if given is not None:
            return given
        value = entropy(prediction_of(outputs), targets)
        head = part_of(outputs, "aux")
        return value if head is None else value + AUX_WEIGHT * entropy(head, targets)

    def wrong(outputs: Any) -> str:
        shape = "(samples, {}, rows, columns)"
        return wrong_logits(prediction_of(outputs), known.num_classes, shape, ndim=4)

    metrics = chosen(config, "segmentation", known, ("mean_iou", "accuracy"))
    return Task(loss, metrics, config.metric, wrong=wrong)


def check_classes(targets: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise RecipeError if targets are no classes. On a GPU the loss checks their values."""
    if targets.is_floating_point():
        raise RecipeError(
            f"task.name segmentation takes classes of pixels, whole numbers; found {targets.dtype} "
            "(a mask that ToTensor has read is a fraction of 255: PILToTensor keeps its numbers)"
        )
    if targets.device.type == "cpu":
        wrong = (targets < 0) | (targets >= num_classes)
        places = (wrong & (targets != ignore_index)).nonzero()
        if len(places):
            row, *pixel = places[0].tolist()
            raise RecipeError(
                f"task.name segmentation: sample {row} of a micro-batch has the class "
                f"{int(targets[row, *pixel])} at pixel {tuple(pixel)}; expected 0 to "
                f"{num_classes - 1}, or task.args ignore_index, {ignore_index}, for none"
            )
