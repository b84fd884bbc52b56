"""Losses of samples that have a class."""

from math import log
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe import blob
from firecaffe.caffe.layers.axis import axis_of, check_bottoms
from firecaffe.caffe.layers.normalization import (
    NO_LABEL,
    in_rows,
    normalization_of,
    with_gradient_of,
    without_normalization,
)
from firecaffe.caffe.layers.spec import Kind, Spec
from firecaffe.caffe.wire import opened

LEAST = torch.finfo(torch.float32).tiny
"""FLT_MIN: what Caffe takes for a probability that is less, in what it reports."""

LEAST_OF_OLD = 1e-20
"""What MultinomialLogisticLoss and InfogainLoss take."""


class SoftmaxWithLoss(nn.Module):
    """Cross entropy. Bottoms: logits, with the classes along `axis`, and a label for each place.

    What is reported adds at most 87.3365 a place, as -log(FLT_MIN) is; its gradient is that of
    what is not cut off.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        check_bottoms(spec, 2)
        self.spec = spec
        self.axis = axis_of(spec, "axis", 1, spec.bottoms[0])
        spec.param.ignore("engine")
        self.normalization = normalization_of(spec.layer)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        rows, classes = in_rows(self.spec, logits, labels, self.axis)
        places = classes.shape
        ignored = self.normalization.ignore_label
        if classes.shape[1] == 1:  # faster so
            rows, classes = rows.squeeze(2), classes.squeeze(1)
        each = F.cross_entropy(
            rows, classes, ignore_index=NO_LABEL if ignored is None else ignored, reduction="none"
        )
        each, classes = each.reshape(places), classes.reshape(places)
        shown = with_gradient_of(each.clamp(max=-log(LEAST)), each)
        loss = self.normalization.of_places(shown, classes)
        return loss if self.spec.num_tops < 2 else (loss, logits.softmax(self.axis))


class MultinomialLogisticLoss(nn.Module):
    """Cross entropy of probabilities, which a Softmax below has made: (N, classes, …)."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        check_bottoms(spec, 2)
        without_normalization(spec)
        self.spec = spec

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        rows, classes = in_rows(self.spec, probabilities.flatten(1), labels, 1)
        own = rows.squeeze(2).gather(1, classes).squeeze(1)
        known = own.detach().clamp(min=LEAST_OF_OLD)
        each = with_gradient_of(-known.log(), -own / known)
        return each.sum() / len(rows)


class InfogainLoss(nn.Module):
    """Cross entropy of logits, in which each pair of label and class has a weight: H(label, class),
    from the binaryproto that `source` names, or a third bottom.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        check_bottoms(spec, 2, 3)
        self.spec = spec
        self.axis = axis_of(spec, "axis", 1, spec.bottoms[0])
        self.normalization = normalization_of(spec.layer)
        source = spec.param.text("source")
        if len(spec.bottoms) < 3 and not source:
            raise spec.layer.error(
                f"{spec.type} {spec.name} has neither infogain_loss_param source nor a third "
                "bottom; expected the matrix of weights in one of them"
            )
        self.matrix = None if len(spec.bottoms) > 2 else _read(spec, source)

    def forward(
        self, logits: Tensor, labels: Tensor, matrix: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows, classes = in_rows(self.spec, logits, labels, self.axis)
        given = self.matrix if matrix is None else matrix.detach()
        count = rows.shape[1]
        if given is None or given.numel() != count**2:
            found = "none" if given is None else f"{given.numel():,} numbers"
            raise self.spec.layer.error(
                f"InfogainLoss {self.spec.name} takes a matrix of {count} x {count}; found {found}"
            )
        of_label = given.to(rows).reshape(count, count)[self.normalization.known(classes)]
        weights = of_label.movedim(-1, 1)
        logs = rows.log_softmax(1)
        each = -(weights * logs).sum(1)
        shown = -(weights * logs.detach().clamp(min=log(LEAST_OF_OLD))).sum(1)
        loss = self.normalization.of_places(with_gradient_of(shown, each), classes)
        return loss if self.spec.num_tops < 2 else (loss, logits.softmax(self.axis))


class HingeLoss(nn.Module):
    """Of one class against all others: the sum over classes of max(0, 1 - t·x), or of its square,
    where t is 1 for the label and -1 for others. Bottoms: (N, classes, …) and a label each.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        check_bottoms(spec, 2)
        without_normalization(spec)
        self.spec = spec
        self.is_square = spec.param.choice("norm", ("", "L1", "L2"), "L1") == "L2"

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        rows, classes = in_rows(self.spec, scores.flatten(1), labels, 1)
        signs = torch.ones_like(rows).scatter_(1, classes[:, None], -1)
        beyond = (1 + signs * rows).relu()
        return (beyond.square() if self.is_square else beyond).sum() / len(rows)


def _read(spec: Spec, source: str) -> Tensor:
    """The numbers of a binaryproto: of a path from the current folder, or from the prototxt's.

    Raises: CaffeError if it is not there, or damaged.
    """
    path = Path(source)
    beside = Path(spec.layer.where).parent / path
    wire = opened(beside if beside.is_file() and not path.is_file() else path)
    return torch.from_numpy(blob.read(wire, 0, len(wire)))


LAYERS: dict[str, Kind] = {
    "HingeLoss": Kind(HingeLoss, "hinge_loss_param", (), is_loss=True, takes_targets=True),
    "InfogainLoss": Kind(InfogainLoss, "infogain_loss_param", (), is_loss=True, takes_targets=True),
    "MultinomialLogisticLoss": Kind(
        MultinomialLogisticLoss, "", (), is_loss=True, takes_targets=True
    ),
    "SoftmaxWithLoss": Kind(SoftmaxWithLoss, "softmax_param", (), is_loss=True, takes_targets=True),
}
"""By the name of the type."""
