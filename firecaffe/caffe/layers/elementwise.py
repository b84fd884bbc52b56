"""Element-wise functions, Dropout, Scale, Bias, Parameter and Axpy.

Sources: caffe.berkeleyvision.org/doxygen for Parameter, and the fork of SENet
(github.com/hujie-frank/SENet; arXiv 1709.01507) for Axpy.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import ENGINE, Function, Kind, Shape, Spec, shown


def element(spec: Spec, function: Callable[..., Tensor], **defaults: float) -> Function:
    number = spec.param.number
    return Function(function, **{word: number(word, value) for word, value in defaults.items()})


def relu(spec: Spec) -> nn.Module:
    slope = spec.param.number("negative_slope")
    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def prelu(spec: Spec) -> nn.Module:
    if len(spec.bottoms[0]) < 2:
        raise spec.error(": its bottom has no channels")
    is_shared = spec.param.flag("channel_shared")
    module = nn.PReLU(1 if is_shared else spec.bottoms[0][1])
    spec.fill("filler", module.weight, 0.25)
    return module


def elu(spec: Spec) -> nn.Module:
    return nn.ELU(spec.param.number("alpha", 1.0))


def plain(spec: Spec, make: Callable[[], nn.Module]) -> nn.Module:
    return make()


def _raised(x: Tensor, power: float, scale: float, shift: float) -> Tensor:
    if power == 0:
        return torch.ones_like(x)
    y = x * scale if scale != 1 else x
    y = y + shift if shift != 0 else y
    if power == 1:
        return y if y is not x else x.clone()
    return y.square() if power == 2 else y**power


def _exponential(x: Tensor, factor: float, outer: float) -> Tensor:
    return torch.exp(x * factor) * outer


def exp(spec: Spec) -> nn.Module:
    """Compute base ^ (shift + scale x); a base of -1 stands for e."""
    base, scale, shift = _base_scale_shift(spec)
    log_base = 1.0 if base == -1 else math.log(base)
    return Function(_exponential, factor=log_base * scale, outer=math.exp(log_base * shift))


def _logarithm(x: Tensor, scale: float, shift: float, factor: float) -> Tensor:
    return torch.log(x * scale + shift) * factor


def log(spec: Spec) -> nn.Module:
    """Compute the logarithm of shift + scale x; a base of -1 stands for e."""
    base, scale, shift = _base_scale_shift(spec)
    factor = 1.0 if base == -1 else 1 / math.log(base)
    return Function(_logarithm, scale=scale, shift=shift, factor=factor)


def _base_scale_shift(spec: Spec) -> tuple[float, float, float]:
    param = spec.param
    base = param.number("base", -1.0)
    if base != -1 and (base <= 0 or (base == 1 and spec.type == "Log")):
        raise spec.error(f": base is {base:g}; expected above 0, or -1 for e", "base")
    return base, param.number("scale", 1.0), param.number("shift", 0.0)


def _is_above(x: Tensor, threshold: float) -> Tensor:
    return (x > threshold).to(x.dtype)


def _swish(x: Tensor, beta: float) -> Tensor:
    return F.silu(x) if beta == 1 else x * torch.sigmoid(x * beta)


class DropoutScaledInTest(nn.Module):
    """Drop a share p without rescaling the rest; in evaluation, multiply all by 1 - p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) * (1 - self.p)


def dropout(spec: Spec) -> nn.Module:
    ratio = spec.param.number("dropout_ratio", 0.5)
    if not 0 <= ratio < 1:
        raise spec.error(f": dropout_ratio is {ratio:g}; expected 0 to below 1", "dropout_ratio")
    is_scaled = spec.param.flag("scale_train", True)
    return nn.Dropout(ratio) if is_scaled else DropoutScaledInTest(ratio)


def _over(factor: Tensor, ones: int) -> Tensor:
    """Append axes of size 1, so that the factor is aligned with the axes before them."""
    return factor.reshape(*factor.shape, *[1] * ones)


class Scale(nn.Module):
    """Multiply by `weight` or a second bottom, and add `bias`. ones: axes after the factor's."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, shape: Shape, ones: int, has_weight: bool, has_bias: bool) -> None:
        super().__init__()
        self.ones = ones
        for name, is_there in (("weight", has_weight), ("bias", has_bias)):
            self.register_parameter(name, nn.Parameter(torch.ones(shape)) if is_there else None)

    def forward(self, x: Tensor, *factor: Tensor) -> Tensor:
        (by,) = factor if self.weight is None else (self.weight,)
        if self.bias is None:
            return x * _over(by, self.ones)
        return torch.addcmul(_over(self.bias, self.ones), x, _over(by, self.ones))


class Bias(nn.Module):
    bias: nn.Parameter | None

    def __init__(self, shape: Shape, ones: int, has_bias: bool) -> None:
        super().__init__()
        self.ones = ones
        bias = nn.Parameter(torch.zeros(shape)) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, *summand: Tensor) -> Tensor:
        (by,) = summand if self.bias is None else (self.bias,)
        return x + _over(by, self.ones)


def _shape(spec: Spec) -> tuple[Shape, int]:
    bottom = spec.bottoms[0]
    if len(spec.bottoms) == 2 and spec.bottoms[1] == ():
        return (), len(bottom)
    axis = spec.axis("axis", 1)
    count = spec.param.integer("num_axes", 1)
    if len(spec.bottoms) == 2:
        count = len(spec.bottoms[1])
    stop = len(bottom) if count == -1 else axis + count
    shape = tuple(bottom[axis:stop])
    if count < -1 or stop > len(bottom):
        raise spec.error(f": {count} axes from {axis} on; its bottom has {len(bottom)}", "num_axes")
    if len(spec.bottoms) == 2 and spec.bottoms[1] != shape:
        raise spec.error(
            f": its second bottom is {shown(spec.bottoms[1])}; expected "
            f"{shown(shape)}, as the first from axis {axis} on"
        )
    return shape, len(bottom) - stop


def scale(spec: Spec) -> nn.Module:
    shape, ones = _shape(spec)
    has_bias = spec.param.flag("bias_term")
    module = Scale(shape, ones, has_weight=len(spec.bottoms) == 1, has_bias=has_bias)
    spec.fill("filler", module.weight, 1.0)
    spec.fill("bias_filler", module.bias)
    return module


def bias(spec: Spec) -> nn.Module:
    shape, ones = _shape(spec)
    module = Bias(shape, ones, has_bias=len(spec.bottoms) == 1)
    spec.fill("filler", module.bias)
    return module


class Parameter(nn.Module):
    """Return the parameter, which starts at 0, since it has no filler in Caffe."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        return self.weight


def parameter(spec: Spec) -> Parameter:
    shape = tuple(spec.param.message("shape").integers("dim"))
    if not all(size > 0 for size in shape):
        raise spec.param.error(f"shape is {shape}; expected sizes above 0")
    return Parameter(shape)


def _axpy(scale: Tensor, values: Tensor, others: Tensor) -> Tensor:
    """Compute a · x + y for a of (B, C) or (B, C, 1, 1), and x and y of (B, C, …)."""
    shape = (*values.shape[:2], *[1] * (values.dim() - 2))
    return scale.reshape(shape) * values + others


def axpy(spec: Spec) -> Function:
    scale, values, others = map(tuple, spec.bottoms)
    if scale[:2] != values[:2] or any(size != 1 for size in scale[2:]) or values != others:
        raise spec.error(
            f" has the bottoms {scale}, {values} and {others}; expected "
            "(B, C, 1, 1) and two of (B, C, H, W)"
        )
    return Function(_axpy)


LAYERS = {
    "AbsVal": Kind(partial(element, function=torch.abs)),
    "BNLL": Kind(partial(plain, make=nn.Softplus)),
    "Clip": Kind(partial(element, function=torch.clamp, min=0.0, max=0.0), "clip_param"),
    "ELU": Kind(elu, "elu_param"),
    "Exp": Kind(exp, "exp_param"),
    "Log": Kind(log, "log_param"),
    "PReLU": Kind(prelu, "prelu_param"),
    "Power": Kind(
        partial(element, function=_raised, power=1.0, scale=1.0, shift=0.0), "power_param"
    ),
    "ReLU": Kind(relu, "relu_param", ignored=ENGINE),
    "ReLU6": Kind(partial(plain, make=nn.ReLU6), "relu6_param", ignored=ENGINE),
    "Sigmoid": Kind(partial(plain, make=nn.Sigmoid), "sigmoid_param", ignored=ENGINE),
    "Swish": Kind(partial(element, function=_swish, beta=1.0), "swish_param", ignored=ENGINE),
    "TanH": Kind(partial(plain, make=nn.Tanh), "tanh_param", ignored=ENGINE),
    "Threshold": Kind(partial(element, function=_is_above, threshold=0.0), "threshold_param"),
    "Dropout": Kind(dropout, "dropout_param"),
    "Bias": Kind(bias, "bias_param", ("bias",), bottoms=(1, 2)),
    "Scale": Kind(scale, "scale_param", bottoms=(1, 2)),
    "Parameter": Kind(parameter, "parameter_param", ("weight",), bottoms=(0,)),
    "Axpy": Kind(axpy, "", (), bottoms=(3,)),
}
