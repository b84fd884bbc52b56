"""Normalizations: BatchNorm, the BN of two forks, Normalize, MVN and LRN.

BN has two forms, with different fields and blobs. PSPNet's and ICNet's (github.com/hszhao/PSPNet)
keeps averages, and its variance divides by the number of values. SegNet's and ENet's
(github.com/alexgkendall/caffe-segnet) keeps none. Normalize is from SSD's fork
(github.com/weiliu89/caffe), after ParseNet (arXiv 1506.04579, section 3.2). MVN, with eps outside
the root, is from caffe.berkeleyvision.org/doxygen/classcaffe_1_1MVNLayer.html.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import ENGINE, Function, Kind, Spec
from firecaffe.caffe.local_response_norm import LocalResponseNorm, LocalResponseNormWithinChannel


class BatchNorm(nn.Module):
    """Subtract the mean of (batch, channels, …) and divide by the deviation; weights are in Scale.

    Caffe's three blobs, here buffers, are sums: of means, of variances, and of their weights. Each
    batch updates a sum S to kept * S + its own value. The statistics are the first two sums over
    the third. As the update is linear, training (gradients/buffers.py) may apply the mean of the
    updates of a step's micro-batches. The result is the same for any number of workers, and equals
    Caffe's if the micro-batch is the batch.

    Args:
        kept: moving_average_fraction, the share of the sums kept from batch to batch.
        eps: The number added to a variance.
        uses_sums: Whether to normalize by the sums, not by the batch. None: if not training.
    """

    mean: Tensor
    variance: Tensor
    factor: Tensor

    def __init__(self, channels: int, kept: float, eps: float, uses_sums: bool | None) -> None:
        super().__init__()
        self.kept, self.eps, self.uses_sums = kept, eps, uses_sums
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.zeros(channels))
        self.register_buffer("factor", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x_BCN = x if x.dim() > 1 else x[:, None]
        uses_sums = self.uses_sums if self.uses_sums is not None else not self.training
        if uses_sums:
            scale = torch.where(self.factor == 0, 0, 1 / self.factor)
            y = F.batch_norm(x_BCN, self.mean * scale, self.variance * scale, eps=self.eps)
        else:
            y = self._by_batch(x_BCN)
        return y.view(x.shape)

    def _by_batch(self, x_BCN: Tensor) -> Tensor:
        if x_BCN.numel() == x_BCN.shape[1]:  # torch refuses one value per channel
            mean, variance = x_BCN.detach().flatten(), torch.zeros_like(self.variance)
            y = x_BCN - x_BCN
        else:
            mean, variance = torch.zeros_like(self.mean), torch.zeros_like(self.variance)
            # With a momentum of 1, torch stores the batch's mean and unbiased variance there.
            y = F.batch_norm(x_BCN, mean, variance, training=True, momentum=1.0, eps=self.eps)
        with torch.no_grad():
            self.mean.mul_(self.kept).add_(mean)
            self.variance.mul_(self.kept).add_(variance)
            self.factor.mul_(self.kept).add_(1)
        return y

    def extra_repr(self) -> str:
        return f"{len(self.mean)}, kept={self.kept:g}, eps={self.eps:g}"


def batch_norm(spec: Spec) -> nn.Module:
    param, bottom = spec.param, spec.bottoms[0]
    uses_sums = param.flag("use_global_stats") if param.has("use_global_stats") else None
    eps, kept = param.number("eps", 1e-5), param.number("moving_average_fraction", 0.999)
    if not (eps > 0 and math.isfinite(eps)):
        raise spec.error(f": eps is {eps:g}; expected above 0", "eps")
    return BatchNorm(bottom[1] if len(bottom) > 1 else 1, kept, eps, uses_sums)


AVERAGED = ("slope_filler", "bias_filler", "momentum", "eps", "frozen")
OWN = ("scale_filler", "shift_filler", "bn_mode")
OWN_EPS = 1e-9


class PSPNetBN(nn.Module):
    """PSPNet's BN of (B, C, H, W), with blobs of (1, C, 1, 1).

    Training uses the batch's statistics, inference moving averages of them; `momentum` is the share
    of an average that a batch keeps. If frozen, averages are always used, and nothing is trained.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int, momentum: float, eps: float, frozen: bool) -> None:
        super().__init__()
        shape = (1, channels, 1, 1)
        for name in ("weight", "bias"):
            if frozen:
                self.register_buffer(name, torch.zeros(shape))
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape) if frozen else torch.zeros(shape))
        self.momentum, self.eps, self.frozen = momentum, eps, frozen

    def forward(self, planes: Tensor) -> Tensor:
        if self.frozen or not self.training:
            return normalized(planes, self.weight, self.bias, self.eps, self.mean, self.variance)
        with torch.no_grad():
            variance, mean = torch.var_mean(planes, (0, 2, 3), correction=0, keepdim=True)
            self.mean.mul_(self.momentum).add_(mean, alpha=1 - self.momentum)
            self.variance.mul_(self.momentum).add_(variance, alpha=1 - self.momentum)
        return normalized(planes, self.weight, self.bias, self.eps)


class SegNetBN(nn.Module):
    """SegNet's BN of (B, C, H, W). It always uses the batch's mean and variance."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, planes: Tensor) -> Tensor:
        return normalized(planes, self.weight, self.bias, OWN_EPS)


class ScaleShift(SegNetBN):
    """SegNet's BN for inference, where the scale and the shift contain the statistics."""

    def forward(self, planes: Tensor) -> Tensor:
        return planes * self.weight + self.bias


def normalized(
    planes: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    mean: Tensor | None = None,
    variance: Tensor | None = None,
) -> Tensor:
    # Unlike functional.batch_norm, it accepts planes of one value, as after global pooling.
    return torch.batch_norm(
        planes,
        weight.flatten(),
        bias.flatten(),
        None if mean is None else mean.flatten(),
        None if variance is None else variance.flatten(),
        mean is None,
        0.0,
        eps,
        torch.backends.cudnn.enabled,
    )


def fork_batch_norm(spec: Spec) -> nn.Module:
    spec.check_axes(4)
    spec.check_tops(1)
    param, channels = spec.param, spec.bottoms[0][1]
    is_averaged, is_own = any(map(param.has, AVERAGED)), any(map(param.has, OWN))
    if is_averaged == is_own:
        raise spec.error(
            f" has the words of {'two forks' if is_own else 'no fork'}; expected "
            f"some of {', '.join(AVERAGED)}, or of {', '.join(OWN)}"
        )
    module: PSPNetBN | SegNetBN
    if is_averaged:
        momentum, eps = param.number("momentum", 0.9), param.number("eps", 1e-5)
        if not 0 <= momentum <= 1:
            raise param.error(f"momentum is {momentum:g}; expected 0 to 1", "momentum")
        module = PSPNetBN(channels, momentum, eps, param.flag("frozen"))
        names = AVERAGED[:2]
    else:
        mode = param.choice("bn_mode", ("LEARN", "INFERENCE"), "LEARN")
        module = SegNetBN(channels) if mode == "LEARN" else ScaleShift(channels)
        names = OWN[:2]
    for word, blob in zip(names, (module.weight, module.bias), strict=True):
        spec.fill(word, blob)
    return module


class Normalize(nn.Module):
    """Compute x / sqrt(sum of x² + eps) · scale, at each place or over the whole sample."""

    def __init__(
        self, channels: int, across_spatial: bool, channel_shared: bool, eps: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(() if channel_shared else (channels,)))
        self.across_spatial, self.eps = across_spatial, eps

    def forward(self, values: Tensor) -> Tensor:
        axes = tuple(range(1, values.dim())) if self.across_spatial else (1,)
        length = (values.square().sum(axes, keepdim=True) + self.eps).sqrt()
        is_shared = self.weight.dim() == 0
        scale = self.weight.view(() if is_shared else (-1, *[1] * (values.dim() - 2)))
        return values / length * scale


def _mvn(values: Tensor, across_channels: bool, normalize_variance: bool, eps: float) -> Tensor:
    """Normalize each plane, or the whole sample (B, C, …), to mean 0 and perhaps variance 1."""
    axes = tuple(range(1 if across_channels else 2, values.dim()))
    centered = values - values.mean(axes, keepdim=True)
    if not normalize_variance:
        return centered
    variance = centered.square().mean(axes, keepdim=True)
    deviation = variance.detach().sqrt() + eps
    # Caffe's gradient treats eps as part of the variance, so it is finite even for a plane of one
    # value.
    return centered / (variance + (deviation.square() - variance.detach())).sqrt()


def normalize(spec: Spec) -> Normalize:
    param = spec.param
    module = Normalize(
        spec.bottoms[0][1],
        param.flag("across_spatial", True),
        param.flag("channel_shared", True),
        param.number("eps", 1e-10),
    )
    if param.has("scale_filler"):
        spec.fill("scale_filler", module.weight)
    return module


def mvn(spec: Spec) -> Function:
    if len(spec.bottoms[0]) < 3:
        raise spec.error(f" takes a bottom with planes; found {tuple(spec.bottoms[0])}")
    param = spec.param
    return Function(
        _mvn,
        across_channels=param.flag("across_channels"),
        normalize_variance=param.flag("normalize_variance", True),
        eps=param.number("eps", 1e-9),
    )


def lrn(spec: Spec) -> nn.Module:
    param = spec.param
    size, alpha = param.integer("local_size", 5), param.number("alpha", 1.0)
    beta, k = param.number("beta", 0.75), param.number("k", 1.0)
    if size < 1 or size % 2 == 0:
        raise spec.error(f": local_size is {size}; expected an odd number", "local_size")
    region = param.choice("norm_region", ("ACROSS_CHANNELS", "WITHIN_CHANNEL"), "ACROSS_CHANNELS")
    if region == "WITHIN_CHANNEL":  # Caffe ignores k there
        return LocalResponseNormWithinChannel(size, alpha, beta)
    return LocalResponseNorm(size, alpha, beta, k)


LAYERS = {
    "BatchNorm": Kind(
        batch_norm, "batch_norm_param", ("mean", "variance", "factor"), ignored=ENGINE
    ),
    "BN": Kind(fork_batch_norm, "bn_param", ("weight", "bias", "mean", "variance"), ignored=ENGINE),
    "MVN": Kind(mvn, "mvn_param", ()),
    "Normalize": Kind(normalize, "norm_param", ("weight",)),
    "LRN": Kind(lrn, "lrn_param", ignored=ENGINE),
}
