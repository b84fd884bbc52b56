"""Which samples of a loss count, and what their sum is divided by: a layer's loss_param."""

from dataclasses import dataclass

from torch import Tensor

from firecaffe.caffe.layers.spec import Spec
from firecaffe.caffe.message import Message

FULL, VALID, BATCH_SIZE, NONE = NORMALIZATIONS = ("FULL", "VALID", "BATCH_SIZE", "NONE")
"""Caffe's, in the order of its enum."""

DEFAULTS = {"InfogainLoss": VALID, "SigmoidCrossEntropyLoss": BATCH_SIZE, "SoftmaxWithLoss": VALID}
"""Of the losses that have one, if none is named."""

NO_LABEL = -(2**63)
"""The label that is ignored where none is; no file can hold it."""


@dataclass(frozen=True)
class Normalization:
    """What a loss_param says."""

    how: str
    """What the sum of the losses is divided by: FULL, all places; VALID, those that count;
    BATCH_SIZE, the samples; NONE, 1.
    """
    ignore_label: int | None = None
    """Places with this label do not count."""

    @property
    def is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of those of its parts of equal size."""
        return self.how in (FULL, BATCH_SIZE) or (self.how == VALID and self.ignore_label is None)

    def known(self, labels: Tensor) -> Tensor:
        """The labels, with 0 in the place of those that do not count."""
        ignored = self.ignore_label
        return labels if ignored is None else labels.where(labels != ignored, 0)

    def of_places(self, each: Tensor, labels: Tensor) -> Tensor:
        """The loss, of that of each place and its label: (samples, places of a sample), int64."""
        outer, inner = labels.shape
        by: Tensor | int = {FULL: outer * inner, BATCH_SIZE: outer, NONE: 1}.get(self.how, 0)
        if self.ignore_label is not None:
            counted = labels != self.ignore_label
            each = each.where(counted, 0)
            return each.sum() / (by or counted.sum().clamp(min=1))
        return each.sum() / (by or outer * inner)


def normalization_of(layer: Message) -> Normalization:
    """That of a layer whose type is in DEFAULTS. Raises: CaffeError."""
    param = layer.message("loss_param")
    how = param.choice("normalization", NORMALIZATIONS, "")
    old = param.flag("normalize", True)  # before 2015; a normalization beside it is what counts
    if not how:
        default = DEFAULTS[layer.text("type")]
        how = (VALID if old else BATCH_SIZE) if param.has("normalize") else default
    return Normalization(how, ignored_label(param))


def without_normalization(spec: Spec) -> None:
    """Of a loss that reads no loss_param: in Caffe it has no effect there either."""
    spec.layer.message("loss_param").ignore("ignore_label", "normalization", "normalize")


def ignored_label(param: Message) -> int | None:
    """The label of places that do not count; None if all do."""
    return param.integer("ignore_label") if param.has("ignore_label") else None


def in_rows(spec: Spec, values: Tensor, labels: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The values as (outer, classes, inner), and the label of each place as int64 (outer, inner),
    whatever the shape in which labels come. axis: that of the classes.

    Raises: CaffeError if there is not one label for each place.
    """
    outer, inner = values.shape[:axis].numel(), values.shape[axis + 1 :].numel()
    if labels.numel() != outer * inner:
        raise spec.layer.error(
            f"{spec.type} {spec.name} takes {outer * inner:,} labels for values of "
            f"{tuple(values.shape)}; found labels of {tuple(labels.shape)}"
        )
    return (
        values.reshape(outer, values.shape[axis], inner),
        labels.detach().reshape(outer, inner).long(),
    )


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """The value, with the other's gradient: where Caffe reports one thing and trains on another."""
    return value.detach() + (other - other.detach())
