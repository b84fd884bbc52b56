"""Caffe's losses for classes, for numbers and for pairs of samples; Accuracy."""

from dataclasses import dataclass
from math import log
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.binary import opened, read_blob
from firecaffe.caffe.layers.spec import ENGINE, Kind, Spec
from firecaffe.caffe.message import Message

FULL, VALID, BATCH_SIZE, NONE = NORMALIZATIONS = ("FULL", "VALID", "BATCH_SIZE", "NONE")

DEFAULTS = {"InfogainLoss": VALID, "SigmoidCrossEntropyLoss": BATCH_SIZE, "SoftmaxWithLoss": VALID}
"""The default normalization of each type that has one."""

NO_LABEL = -(2**63)
"""The ignored label if none is configured: a value that no file can hold."""


@dataclass(frozen=True)
class Normalization:
    how: str
    """The divisor: FULL, all places; VALID, places that count; BATCH_SIZE, samples; NONE, 1."""
    ignore_label: int | None = None

    @property
    def is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of the losses of equal parts of it."""
        return self.how in (FULL, BATCH_SIZE) or (self.how == VALID and self.ignore_label is None)

    def known(self, labels: Tensor) -> Tensor:
        ignored = self.ignore_label
        return labels if ignored is None else labels.where(labels != ignored, 0)

    def of_places(self, losses: Tensor, labels: Tensor) -> Tensor:
        """Return the loss from losses and int64 labels, both (samples, places per sample)."""
        outer, inner = labels.shape
        by: Tensor | int = {FULL: outer * inner, BATCH_SIZE: outer, NONE: 1}.get(self.how, 0)
        if self.ignore_label is not None:
            counted = labels != self.ignore_label
            losses = losses.where(counted, 0)
            return losses.sum() / (by or counted.sum().clamp(min=1))
        return losses.sum() / (by or outer * inner)


def normalization_of(layer: Message) -> Normalization:
    """Return the normalization of a layer whose type is in DEFAULTS. Raises CaffeError."""
    param = layer.message("loss_param")
    how = param.choice("normalization", NORMALIZATIONS, "")
    old = param.flag("normalize", True)  # before 2015; `normalization` overrides it
    if not how:
        default = DEFAULTS[layer.text("type")]
        how = (VALID if old else BATCH_SIZE) if param.has("normalize") else default
    return Normalization(how, ignored_label(param))


def ignored_label(param: Message) -> int | None:
    return param.integer("ignore_label") if param.has("ignore_label") else None


def in_rows(spec: Spec, values: Tensor, labels: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Reshape values to (outer, classes, inner), and labels to int64 (outer, inner)."""
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
    """Return `value` with the gradient of `other`: Caffe reports one loss and trains on another."""
    return value.detach() + (other - other.detach())


LEAST = torch.finfo(torch.float32).tiny
"""FLT_MIN, the lower bound of probabilities in the losses that Caffe reports."""

LOG_THRESHOLD = 1e-20
"""The lower bound of probabilities in MultinomialLogisticLoss and InfogainLoss."""


class _OfSamples(nn.Module):
    """A loss that does not use its loss_param, as in Caffe."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        spec.layer.message("loss_param").ignore("ignore_label", "normalization", "normalize")
        self.spec = spec


class SoftmaxWithLoss(nn.Module):
    """Cross entropy of logits, with classes along `axis`, and a label for each place.

    The reported loss of a place is at most 87.3365, which is -log(FLT_MIN); its gradient is not
    clipped.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.axis = spec.axis("axis", 1)
        self.normalization = normalization_of(spec.layer)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        rows, classes = in_rows(self.spec, logits, labels, self.axis)
        places = classes.shape
        ignored = self.normalization.ignore_label
        if classes.shape[1] == 1:  # faster
            rows, classes = rows.squeeze(2), classes.squeeze(1)
        losses = F.cross_entropy(
            rows, classes, ignore_index=NO_LABEL if ignored is None else ignored, reduction="none"
        )
        losses, classes = losses.reshape(places), classes.reshape(places)
        shown = with_gradient_of(losses.clamp(max=-log(LEAST)), losses)
        loss = self.normalization.of_places(shown, classes)
        return loss if self.spec.num_tops < 2 else (loss, logits.softmax(self.axis))


class MultinomialLogisticLoss(_OfSamples):
    """Cross entropy of probabilities (N, classes, …) from a Softmax."""

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        rows, classes = in_rows(self.spec, probabilities.flatten(1), labels, 1)
        of_label = rows.squeeze(2).gather(1, classes).squeeze(1)
        known = of_label.detach().clamp(min=LOG_THRESHOLD)
        losses = with_gradient_of(-known.log(), -of_label / known)
        return losses.sum() / len(rows)


class InfogainLoss(nn.Module):
    """Cross entropy of logits, weighted by H(label, class) from `source` or a third bottom."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.axis = spec.axis("axis", 1)
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
            size = "none" if given is None else f"{given.numel():,} numbers"
            raise self.spec.layer.error(
                f"InfogainLoss {self.spec.name} takes a matrix of {count} x {count}; found {size}"
            )
        of_label = given.to(rows).reshape(count, count)[self.normalization.known(classes)]
        weights = of_label.movedim(-1, 1)
        logs = rows.log_softmax(1)
        losses = -(weights * logs).sum(1)
        shown = -(weights * logs.detach().clamp(min=log(LOG_THRESHOLD))).sum(1)
        loss = self.normalization.of_places(with_gradient_of(shown, losses), classes)
        return loss if self.spec.num_tops < 2 else (loss, logits.softmax(self.axis))


class HingeLoss(_OfSamples):
    """The mean over samples of the sum of max(0, 1 - t·x), or of its square with norm L2.

    t is 1 for the label and -1 for other classes. The bottoms are (N, classes, …) and the labels.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.is_square = spec.param.choice("norm", ("", "L1", "L2"), "L1") == "L2"

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        rows, classes = in_rows(self.spec, scores.flatten(1), labels, 1)
        signs = torch.ones_like(rows).scatter_(1, classes[:, None], -1)
        beyond = (1 + signs * rows).relu()
        return (beyond.square() if self.is_square else beyond).sum() / len(rows)


def _read(spec: Spec, source: str) -> Tensor:
    """Read a binaryproto, relative to the current folder or else to the prototxt's folder."""
    path = Path(source)
    next_to_prototxt = Path(spec.layer.where).parent / path
    wire = opened(next_to_prototxt if next_to_prototxt.is_file() and not path.is_file() else path)
    return torch.from_numpy(read_blob(wire, 0, len(wire)))


class Accuracy(nn.Module):
    """The share of labels whose value is reached by fewer than top_k other classes.

    Equal values and NaNs reach it (in Caffe, a NaN is lower). The second top, if there is one, is
    the share for each class, 0 for a class that does not occur.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.axis = spec.axis("axis", 1)
        self.top_k = spec.param.integer("top_k", 1)
        self.ignore_label = ignored_label(spec.param)
        if not 1 <= self.top_k <= max(1, spec.bottoms[0][self.axis]):
            raise spec.param.error(
                f"top_k is {self.top_k}; expected 1 to the number of classes, "
                f"{spec.bottoms[0][self.axis]}",
                "top_k",
            )

    def forward(self, values: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        correct, counted, classes = self.of_places(values, labels)
        share = correct.sum() / counted.sum().clamp(min=1)
        if self.spec.num_tops < 2:
            return share
        number = values.shape[self.axis]
        hits = torch.zeros(number, device=values.device)
        hits = hits.index_add(0, classes.flatten(), correct.flatten().float())
        all_of = torch.zeros(number, device=values.device)
        all_of = all_of.index_add(0, classes.flatten(), counted.flatten().float())
        return share, hits / all_of.clamp(min=1)

    def sums(self, values: Tensor, labels: Tensor) -> Tensor:
        correct, counted, _ = self.of_places(values, labels)
        return torch.stack([correct.sum(), counted.sum()])

    def of_places(self, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (outer, inner) each: which labels are correct, which count, the labels or 0."""
        rows, classes = in_rows(self.spec, values.detach(), labels, self.axis)
        counted = torch.ones_like(classes, dtype=torch.bool)
        if self.ignore_label is not None:
            counted = classes != self.ignore_label
            classes = classes.where(counted, 0)
        of_label = rows.gather(1, classes[:, None])
        as_high = (~(rows < of_label)).sum(1)  # includes the label itself
        return (as_high <= self.top_k) & counted, counted, classes


def softmax(spec: Spec) -> nn.Module:
    return nn.Softmax(spec.axis("axis", 1))


EPSILON = 1e-4
"""The number added to the distance in the divisor of ContrastiveLoss's gradient."""


class EuclideanLoss(_OfSamples):
    """Half of the squared distance, averaged over samples."""

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        other = alike(self.spec, values, targets)
        return (values - other).square().sum() / len(values) / 2


class L1Loss(_OfSamples):
    """The sum of absolute differences, averaged over samples. From NVIDIA's fork for DetectNet."""

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        return (values - alike(self.spec, values, targets)).abs().sum() / len(values)


class SigmoidCrossEntropyLoss(nn.Module):
    """Binary cross entropy of each logit. Targets are from 0 to 1."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.normalization = normalization_of(spec.layer)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        aims = alike(self.spec, logits, targets).detach().flatten(1)
        losses = F.binary_cross_entropy_with_logits(logits.flatten(1), aims, reduction="none")
        return self.normalization.of_places(losses, aims.long())


class SmoothL1Loss(_OfSamples):
    """The loss of the forks of Fast R-CNN and of SSD; SSD's sigma is 1.

    With d = inside · (a - b) and beta = 1/sigma², it is the mean over samples of outside ·
    (d²/(2·beta) if |d| < beta, else |d| - beta/2). The bottoms are a, b, inside and outside; the
    last two default to 1. Source: Girshick, arXiv:1504.08083, (3); Ren et al., arXiv:1506.01497.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        sigma = spec.param.number("sigma", 1.0)
        if not sigma > 0:
            raise spec.param.error(f"sigma is {sigma:g}; expected more than 0", "sigma")
        self.beta = 1 / sigma**2

    def forward(self, values: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
        inside_and_outside = [alike(self.spec, values, weight).detach() for weight in weights]
        difference = values - alike(self.spec, values, targets)
        if inside_and_outside:
            difference = inside_and_outside[0] * difference
        losses = F.smooth_l1_loss(
            difference, torch.zeros_like(difference), reduction="none", beta=self.beta
        )
        if len(inside_and_outside) > 1:
            losses = inside_and_outside[1] * losses
        return losses.sum() / len(values)


class ContrastiveLoss(_OfSamples):
    """The loss of pairs: half of d² if they belong together, else half of max(margin - d, 0)².

    d is their distance. With legacy_version, the latter is half of max(margin - d², 0). The bottoms
    are (N, C), (N, C), and whether each pair belongs together. Source: Hadsell, Chopra and LeCun,
    "Dimensionality Reduction by Learning an Invariant Mapping".
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.margin = spec.param.number("margin", 1.0)
        self.is_legacy = spec.param.flag("legacy_version")

    def forward(self, a: Tensor, b: Tensor, together: Tensor) -> Tensor:
        squared = (a - alike(self.spec, a, b)).flatten(1).square().sum(1)
        if together.numel() != len(squared):
            raise self.spec.layer.error(
                f"ContrastiveLoss {self.spec.name} takes one label for each of {len(squared)} "
                f"pairs; found labels of {tuple(together.shape)}"
            )
        is_together = together.detach().flatten().long() != 0
        if self.is_legacy:
            apart = (self.margin - squared).relu()
        else:
            distance = squared.detach().sqrt()
            beyond = (self.margin - distance).relu()
            # Caffe's gradient divides by the distance plus EPSILON, which is never 0.
            apart = with_gradient_of(beyond.square(), -squared * beyond / (distance + EPSILON))
        return squared.where(is_together, apart).sum() / len(squared) / 2


def alike(spec: Spec, values: Tensor, targets: Tensor) -> Tensor:
    """Return the targets in the values' shape and type. Raises CaffeError if their sizes differ."""
    if len(targets) != len(values) or targets.numel() != values.numel():
        raise spec.layer.error(
            f"{spec.type} {spec.name} takes bottoms of one shape; found {tuple(values.shape)} and "
            f"{tuple(targets.shape)}"
        )
    return targets.reshape(values.shape).to(values.dtype)


LAYERS = {
    "HingeLoss": Kind(HingeLoss, "hinge_loss_param", (), is_loss=True, bottoms=(2,)),
    "InfogainLoss": Kind(InfogainLoss, "infogain_loss_param", (), is_loss=True, bottoms=(2, 3)),
    "MultinomialLogisticLoss": Kind(MultinomialLogisticLoss, "", (), is_loss=True, bottoms=(2,)),
    "SoftmaxWithLoss": Kind(
        SoftmaxWithLoss, "softmax_param", (), is_loss=True, bottoms=(2,), ignored=ENGINE
    ),
    "Accuracy": Kind(Accuracy, "accuracy_param", (), takes_targets=True, bottoms=(2,)),
    "Softmax": Kind(softmax, "softmax_param", ignored=ENGINE),
    "ContrastiveLoss": Kind(
        ContrastiveLoss, "contrastive_loss_param", (), is_loss=True, bottoms=(3,)
    ),
    "EuclideanLoss": Kind(EuclideanLoss, "", (), is_loss=True, bottoms=(2,)),
    "L1Loss": Kind(L1Loss, "", (), is_loss=True, bottoms=(2,)),
    "SigmoidCrossEntropyLoss": Kind(
        SigmoidCrossEntropyLoss, "sigmoid_param", (), is_loss=True, bottoms=(2,), ignored=ENGINE
    ),
    "SmoothL1Loss": Kind(SmoothL1Loss, "smooth_l1_loss_param", (), is_loss=True, bottoms=(2, 3, 4)),
}
