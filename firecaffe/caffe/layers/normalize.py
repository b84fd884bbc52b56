"""Normalize (to length 1 over the channels) and MVN (to mean 0, variance 1).

Sources: Normalize, SSD's fork (github.com/weiliu89/caffe), after ParseNet (arXiv 1506.04579,
section 3.2): x / sqrt(sum of x² + eps) · scale. MVN, Caffe's API documentation
(caffe.berkeleyvision.org/doxygen/classcaffe_1_1MVNLayer.html): eps stands outside of the root.
"""

import torch
from torch import Tensor, nn

from firecaffe.caffe.fillers import filler
from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class Normalize(nn.Module):
    """(B, C, …) to length 1 and times the scale: at each place, or over the whole sample."""

    def __init__(
        self, channels: int, across_spatial: bool, channel_shared: bool, eps: float
    ) -> None:
        """channel_shared: one scale, of shape (), for all channels; otherwise (C,)."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(() if channel_shared else (channels,)))
        self.across_spatial, self.eps = across_spatial, eps

    def forward(self, values: Tensor) -> Tensor:
        axes = tuple(range(1, values.dim())) if self.across_spatial else (1,)
        length = (values.square().sum(axes, keepdim=True) + self.eps).sqrt()
        is_shared = self.weight.dim() == 0
        scale = self.weight.view(() if is_shared else (-1, *[1] * (values.dim() - 2)))
        return values / length * scale


class MVN(nn.Module):
    """(B, C, …) less its mean, over its deviation: of each plane, or of the whole sample."""

    def __init__(self, across_channels: bool, normalize_variance: bool, eps: float) -> None:
        super().__init__()
        self.first = 1 if across_channels else 2
        self.normalize_variance, self.eps = normalize_variance, eps

    def forward(self, values: Tensor) -> Tensor:
        axes = tuple(range(self.first, values.dim()))
        centered = values - values.mean(axes, keepdim=True)
        if not self.normalize_variance:
            return centered
        variance = centered.square().mean(axes, keepdim=True)
        deviation = variance.detach().sqrt() + self.eps
        # Caffe's gradient takes eps for a part of the variance. So it is finite for a plane of one
        # value, too.
        return centered / (variance + (deviation.square() - variance.detach())).sqrt()


def normalize(spec: Spec) -> Normalize:
    check_bottoms(spec, 1)
    param = spec.param
    module = Normalize(
        spec.bottoms[0][1],
        param.flag("across_spatial", True),
        param.flag("channel_shared", True),
        param.number("eps", 1e-10),
    )
    if param.has("scale_filler"):
        filler(param.message("scale_filler"))(module.weight)
    return module


def mvn(spec: Spec) -> MVN:
    check_bottoms(spec, 1)
    if len(spec.bottoms[0]) < 3:
        raise spec.layer.error(
            f"MVN {spec.name!r} takes a bottom with planes; found {tuple(spec.bottoms[0])}"
        )
    param = spec.param
    return MVN(
        param.flag("across_channels"),
        param.flag("normalize_variance", True),
        param.number("eps", 1e-9),
    )


LAYERS = {
    "MVN": Kind(mvn, "mvn_param", ()),
    "Normalize": Kind(normalize, "norm_param", ("weight",)),
}
