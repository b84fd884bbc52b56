"""The built-in tasks. Cross entropy: one class per sample, several labels, or one per pixel.

Regression: samples with numbers of any shape; squared, absolute or Huber's error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from firecaffe.errors import RecipeError
from firecaffe.models.googlenet import AUX_WEIGHT
from firecaffe.tasks import TaskConfig
from firecaffe.tasks.metrics import EXACT, PLACES, chosen, count_correct
from firecaffe.tasks.outputs import aligned, own_loss, part_of, prediction_of
from firecaffe.tasks.task import Counts, Known, Task, class_weights

AUX_HEADS = ("aux2", "aux1", "aux_logits2", "aux_logits1", "aux_logits")
"""Names of auxiliary heads in our networks and in torchvision's GoogLeNet and Inception."""


NO_CLASS = -(2**63)
"""The `ignore_index` of cross entropy if every sample counts: a label that no data has."""


def classification(config: TaskConfig, num_classes: int | None) -> Task:
    """Make the task. Targets are int64 (B,); outputs are logits (B, classes), or several outputs.

    The loss of each auxiliary head is added with the factor AUX_WEIGHT.
    """
    known = Known(num_classes)
    weights = class_weights(config, known)
    smoothing = config.label_smoothing
    words: dict[str, Any] = {"label_smoothing": smoothing, "ignore_index": NO_CLASS}

    def entropy(logits: Tensor, labels: Tensor) -> Tensor:
        try:
            if weights is None:
                return F.cross_entropy(logits, labels, **words)
            losses = F.cross_entropy(logits, labels, weights.to(logits), reduction="none", **words)
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

    # With five classes every label is among the first five. The number may also be unknown.
    counted = EXACT if num_classes is not None and num_classes > PLACES else EXACT[:1]
    return Task(
        loss,
        chosen(config, "classification", known, counted),
        config.metric,
        counts=Counts(counted, lambda *batch: count_correct(*batch)[: len(counted)]),
        classes=lambda labels: [int(label) for label in labels.tolist()],
        wrong=_wrong_logits(num_classes, "(samples, {})", 2),
    )


def _no_output(logits: Tensor, labels: Tensor) -> RecipeError:
    num_classes = logits.shape[1]
    sample = int(((labels < 0) | (labels >= num_classes)).nonzero()[0])
    return RecipeError(
        f"task.name classification: sample {sample} of a micro-batch has the class "
        f"{int(labels[sample])}; the network has outputs for 0 to {num_classes - 1}"
    )


def _wrong_logits(num_classes: int | None, shape: str, ndim: int) -> Callable[[Any], str]:
    """Return a `Task.wrong` for logits of this shape, with classes in the second dimension."""

    def wrong(outputs: Any) -> str:
        logits = prediction_of(outputs)
        if logits.ndim == ndim and logits.shape[1] >= (num_classes or 1):
            return ""
        expected = shape.format(num_classes or "classes")
        return f"outputs of {tuple(logits.shape)}; expected logits of {expected}"

    return wrong


CLASSIFICATION = classification(TaskConfig(), None)
"""The task of a recipe that names none."""


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

    metrics = chosen(config, "multilabel", known, ("f1", "exact_match"))
    return Task(loss, metrics, config.metric, wrong=_wrong_logits(num_classes, "(samples, {})", 2))


IGNORED = -100

PIXELS_AUX_WEIGHT = 0.5
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
        return value if head is None else value + PIXELS_AUX_WEIGHT * entropy(head, targets)

    metrics = chosen(config, "segmentation", known, ("mean_iou", "accuracy"))
    wrong = _wrong_logits(num_classes, "(samples, {}, rows, columns)", 4)
    return Task(loss, metrics, config.metric, wrong=wrong)


def check_classes(targets: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise RecipeError if targets are not classes. On a GPU the loss checks their values."""
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


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
}


def regression(
    config: TaskConfig, num_classes: int | None, *, loss: str = "mse", delta: float = 1.0
) -> Task:
    """Make the task. Targets and outputs are floating point of one shape, or (B, 1) and (B,).

    loss: A row of LOSSES. delta: The error from which on Huber's grows linearly.
    """
    if loss not in LOSSES:
        raise RecipeError(f"task.args.loss is {loss!r}; expected one of {', '.join(LOSSES)}")
    if delta <= 0:
        raise RecipeError(f"task.args.delta is {delta!r}; it must be more than 0")
    error = partial(LOSSES[loss], delta=delta) if loss == "huber" else LOSSES[loss]

    def mean_error(outputs: Any, targets: Tensor) -> Tensor:
        given = own_loss(outputs)
        return error(*aligned(outputs, targets)) if given is None else given

    metrics = chosen(config, "regression", Known(), ("mae", "rmse", "r2"))
    return Task(mean_error, metrics, config.metric)
