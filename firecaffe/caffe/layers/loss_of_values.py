"""Losses of samples whose targets are numbers, and of pairs of samples."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.loss import normalization_of, with_gradient_of, without_normalization
from firecaffe.caffe.layers.spec import Kind, Spec

EPSILON = 1e-4
"""The term added to a distance in the divisor of ContrastiveLoss's gradient."""


class _OfSamples(nn.Module):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        without_normalization(spec)
        self.spec = spec


class EuclideanLoss(_OfSamples):
    """Half the squared distance, as a mean over samples."""

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        other = alike(self.spec, values, targets)
        return (values - other).square().sum() / len(values) / 2


class L1Loss(_OfSamples):
    """The sum of absolute differences, as a mean over samples, from NVIDIA's fork for DetectNet."""

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        return (values - alike(self.spec, values, targets)).abs().sum() / len(values)


class SigmoidCrossEntropyLoss(nn.Module):
    """Binary cross entropy of each logit; targets are from 0 to 1."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        spec.layer.message("sigmoid_param").ignore("engine")
        self.spec = spec
        self.normalization = normalization_of(spec.layer)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        aims = alike(self.spec, logits, targets).detach().flatten(1)
        losses = F.binary_cross_entropy_with_logits(logits.flatten(1), aims, reduction="none")
        return self.normalization.of_places(losses, aims.long())


class SmoothL1Loss(nn.Module):
    """The loss of Fast R-CNN's fork, and of SSD's, whose sigma is 1.

    With d = inside · (a - b) and beta = 1/sigma², it is the mean over samples of outside ·
    (d²/(2·beta) if |d| < beta, else |d| - beta/2). The bottoms are a, b, inside and outside; a
    missing weight is 1. Source: Girshick, arXiv:1504.08083, (3); Ren et al., arXiv:1506.01497.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        without_normalization(spec)
        self.spec = spec
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


class ContrastiveLoss(nn.Module):
    """The loss of pairs: half of d² if they belong together, else half of max(margin - d, 0)².

    d is their distance. With legacy_version the second is half of max(margin - d², 0). The bottoms
    are (N, C), (N, C), and whether each pair belongs together. Source: Hadsell, Chopra and LeCun,
    "Dimensionality Reduction by Learning an Invariant Mapping".
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        without_normalization(spec)
        self.spec = spec
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


LAYERS: dict[str, Kind] = {
    "ContrastiveLoss": Kind(
        ContrastiveLoss, "contrastive_loss_param", (), is_loss=True, bottoms=(3,)
    ),
    "EuclideanLoss": Kind(EuclideanLoss, "", (), is_loss=True, bottoms=(2,)),
    "L1Loss": Kind(L1Loss, "", (), is_loss=True, bottoms=(2,)),
    "SigmoidCrossEntropyLoss": Kind(SigmoidCrossEntropyLoss, "", (), is_loss=True, bottoms=(2,)),
    "SmoothL1Loss": Kind(SmoothL1Loss, "smooth_l1_loss_param", (), is_loss=True, bottoms=(2, 3, 4)),
}
