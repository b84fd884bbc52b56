"""BN: the batch normalization of two forks, which have one name and different words and blobs.

PSPNet's and ICNet's (github.com/hszhao/PSPNet) keeps averages of means and variances; what a
variance divides by is the number of values. SegNet's and ENet's (github.com/alexgkendall/
caffe-segnet) keeps none: it takes each batch's own, or with INFERENCE only scales and shifts.
"""

import torch
from torch import Tensor, nn

from firecaffe.caffe.fillers import filler
from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import want_axes, want_tops
from firecaffe.caffe.layers.spec import Kind, Spec

AVERAGED = ("slope_filler", "bias_filler", "momentum", "eps", "frozen")
"""The words of PSPNet's."""
OWN = ("scale_filler", "shift_filler", "bn_mode")
"""Those of SegNet's."""
OWN_EPS = 1e-9


class AveragedBN(nn.Module):
    """(B, C, H, W) to the same: by the batch's own mean and variance while training, else by their
    averages, of which each batch keeps a share of `momentum`. If frozen, always by the averages,
    and nothing is trained. Blobs are (1, C, 1, 1).
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


class OwnBN(nn.Module):
    """(B, C, H, W) to the same: by the batch's own mean and variance, training or not."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, planes: Tensor) -> Tensor:
        return normalized(planes, self.weight, self.bias, OWN_EPS)


class ScaleShift(OwnBN):
    """(B, C, H, W) to the same: the statistics are in the scale and the shift."""

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
    """By the mean and the variance that are given, or by the planes' own."""
    # Unlike functional.batch_norm it takes planes of a single value, as of a global pooling.
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


def batch_norm(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    want_axes(spec, 4)
    want_tops(spec, 1)
    param, channels = spec.param, spec.bottoms[0][1]
    param.ignore("engine")
    is_averaged, is_own = any(map(param.has, AVERAGED)), any(map(param.has, OWN))
    if is_averaged == is_own:
        raise spec.layer.error(
            f"BN {spec.name!r} has the words of {'two forks' if is_own else 'no fork'}; expected "
            f"some of {', '.join(AVERAGED)}, or of {', '.join(OWN)}"
        )
    module: AveragedBN | OwnBN
    if is_averaged:
        momentum, eps = param.number("momentum", 0.9), param.number("eps", 1e-5)
        if not 0 <= momentum <= 1:
            raise param.error(
                f"momentum is {momentum:g}; expected 0 to 1", param.line_of("momentum")
            )
        module = AveragedBN(channels, momentum, eps, param.flag("frozen"))
        words = AVERAGED[:2]
    else:
        mode = param.choice("bn_mode", ("LEARN", "INFERENCE"), "LEARN")
        module = OwnBN(channels) if mode == "LEARN" else ScaleShift(channels)
        words = OWN[:2]
    for word, blob in zip(words, (module.weight, module.bias), strict=True):
        filler(param.message(word))(blob)
    return module


LAYERS = {"BN": Kind(batch_norm, "bn_param", ("weight", "bias", "mean", "variance"))}
