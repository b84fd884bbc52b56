"""Functions of one element: ReLU and its kin, Sigmoid, Power, Exp, Log …"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.fillers import filler
from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class Element(nn.Module):
    """A function of one element."""

    def __init__(self, function: Callable[[Tensor], Tensor], shown: str) -> None:
        super().__init__()
        self.function, self.shown = function, shown

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.shown


def relu(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    spec.param.ignore("engine")
    slope = spec.param.number("negative_slope")
    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def prelu(spec: Spec) -> nn.Module:
    """A slope for each channel, or one for all."""
    check_bottoms(spec, 1)
    if len(spec.bottoms[0]) < 2:
        raise spec.layer.error(f"PReLU {spec.name!r}: its bottom has no channels")
    is_shared = spec.param.flag("channel_shared")
    module = nn.PReLU(1 if is_shared else spec.bottoms[0][1])
    filler(spec.param.message("filler"), 0.25)(module.weight)
    return module


def elu(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    return nn.ELU(spec.param.number("alpha", 1.0))


def plain(spec: Spec, make: Callable[[], nn.Module]) -> nn.Module:
    """Of no words but which library computes it."""
    check_bottoms(spec, 1)
    spec.param.ignore("engine")
    return make()


def _raised(x: Tensor, power: float, scale: float, shift: float) -> Tensor:
    if power == 0:
        return torch.ones_like(x)
    y = x * scale if scale != 1 else x
    y = y + shift if shift != 0 else y
    if power == 1:
        return y if y is not x else x.clone()
    return y.square() if power == 2 else y**power


def power(spec: Spec) -> nn.Module:
    """(shift + scale x) ^ power."""
    check_bottoms(spec, 1)
    param = spec.param
    words: dict[str, Any] = {
        "power": param.number("power", 1.0),
        "scale": param.number("scale", 1.0),
        "shift": param.number("shift", 0.0),
    }
    return Element(partial(_raised, **words), _said(words))


def _exponential(x: Tensor, factor: float, outer: float) -> Tensor:
    return torch.exp(x * factor) * outer


def exp(spec: Spec) -> nn.Module:
    """base ^ (shift + scale x); a base of -1 stands for e."""
    check_bottoms(spec, 1)
    base, scale, shift = _base_scale_shift(spec)
    log_base = 1.0 if base == -1 else math.log(base)
    words: dict[str, Any] = {"factor": log_base * scale, "outer": math.exp(log_base * shift)}
    return Element(partial(_exponential, **words), _said(words))


def _logarithm(x: Tensor, scale: float, shift: float, factor: float) -> Tensor:
    return torch.log(x * scale + shift) * factor


def log(spec: Spec) -> nn.Module:
    """The logarithm of shift + scale x; a base of -1 stands for e."""
    check_bottoms(spec, 1)
    base, scale, shift = _base_scale_shift(spec)
    words: dict[str, Any] = {
        "scale": scale,
        "shift": shift,
        "factor": 1.0 if base == -1 else 1 / math.log(base),
    }
    return Element(partial(_logarithm, **words), _said(words))


def _base_scale_shift(spec: Spec) -> tuple[float, float, float]:
    param = spec.param
    base = param.number("base", -1.0)
    if base != -1 and (base <= 0 or (base == 1 and spec.type == "Log")):
        raise spec.layer.error(
            f"{spec.type} {spec.name!r}: base is {base:g}; expected above 0, or -1 for e",
            param.line_of("base"),
        )
    return base, param.number("scale", 1.0), param.number("shift", 0.0)


def _is_above(x: Tensor, threshold: float) -> Tensor:
    return (x > threshold).to(x.dtype)


def threshold(spec: Spec) -> nn.Module:
    """1 above the threshold, else 0."""
    check_bottoms(spec, 1)
    words: dict[str, Any] = {"threshold": spec.param.number("threshold", 0.0)}
    return Element(partial(_is_above, **words), _said(words))


def _swish(x: Tensor, beta: float) -> Tensor:
    return F.silu(x) if beta == 1 else x * torch.sigmoid(x * beta)


def swish(spec: Spec) -> nn.Module:
    """x sigmoid(beta x)."""
    check_bottoms(spec, 1)
    spec.param.ignore("engine")
    words: dict[str, Any] = {"beta": spec.param.number("beta", 1.0)}
    return Element(partial(_swish, **words), _said(words))


def clip(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    low, high = spec.param.number("min"), spec.param.number("max")
    return Element(partial(torch.clamp, min=low, max=high), f"{low:g} to {high:g}")


def _said(words: dict[str, float]) -> str:
    return ", ".join(f"{word}={value:g}" for word, value in words.items())


LAYERS = {
    "AbsVal": Kind(partial(plain, make=partial(Element, torch.abs, "|x|"))),
    "BNLL": Kind(partial(plain, make=nn.Softplus)),
    "Clip": Kind(clip, "clip_param"),
    "ELU": Kind(elu, "elu_param"),
    "Exp": Kind(exp, "exp_param"),
    "Log": Kind(log, "log_param"),
    "PReLU": Kind(prelu, "prelu_param"),
    "Power": Kind(power, "power_param"),
    "ReLU": Kind(relu, "relu_param"),
    "ReLU6": Kind(partial(plain, make=nn.ReLU6), "relu6_param"),
    "Sigmoid": Kind(partial(plain, make=nn.Sigmoid), "sigmoid_param"),
    "Swish": Kind(swish, "swish_param"),
    "TanH": Kind(partial(plain, make=nn.Tanh), "tanh_param"),
    "Threshold": Kind(threshold, "threshold_param"),
}
