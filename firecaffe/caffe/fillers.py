"""Caffe's weight fillers, so that a network is initialized as in its authors' file.

fan_in is the number of inputs that one output sums: in_channels / groups x kernel height x kernel
width for a convolution, in_features for a fully connected layer. fan_out is Caffe's counterpart for
the backward direction: the number of weights over their second dimension. Source: Caffe's
include/caffe/filler.hpp. Its xavier is Glorot and Bengio 2010, with fan_in alone unless
variance_norm says otherwise; msra is He et al. 2015 (arXiv 1502.01852); bilinear is the upsampling
of Long et al. 2015 (arXiv 1411.4038).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from firecaffe.caffe.message import Message

Fill = Callable[[Tensor], object]
"""A function that fills a tensor in place. On the meta device it does nothing."""

LARGEST = 1e38
"""The largest bound of random values; float32 ends at 3.4e38."""

VARIANCE_NORMS = ("FAN_IN", "FAN_OUT", "AVERAGE")


def _fan(weight: Tensor, norm: str = "FAN_IN") -> float:
    fan_in = weight.numel() / weight.shape[0]
    fan_out = weight.numel() / (weight.shape[1] if weight.dim() > 1 else 1)
    return {"FAN_IN": fan_in, "FAN_OUT": fan_out, "AVERAGE": (fan_in + fan_out) / 2}[norm]


def constant(value: float) -> Fill:
    return partial(nn.init.constant_, val=value)


def uniform(low: float, high: float) -> Fill:
    return partial(nn.init.uniform_, a=low, b=high)


def gaussian(std: float, mean: float = 0.0, sparse: int = -1) -> Fill:
    """Fill with normal values. `sparse`: mean number of nonzero inputs per output; -1: all."""

    @torch.no_grad()
    def fill(weight: Tensor) -> None:
        nn.init.normal_(weight, mean, std)
        if sparse >= 0:
            share = min(1.0, sparse / weight.shape[0])  # Caffe's rule: over the number of outputs
            weight.mul_(torch.bernoulli(torch.full_like(weight, share)))

    return fill


def xavier(weight: Tensor, norm: str = "FAN_IN") -> None:
    """Fill uniformly within ±sqrt(3 / fan), so that the variance is 1 / fan."""
    bound = math.sqrt(3 / _fan(weight, norm))
    nn.init.uniform_(weight, -bound, bound)


def msra(weight: Tensor, norm: str = "FAN_IN") -> None:
    """Fill with normal values of mean 0 and variance 2 / fan."""
    nn.init.normal_(weight, 0.0, math.sqrt(2 / _fan(weight, norm)))


def msra_fan_out(weight: Tensor) -> None:
    """Fill with normal values of mean 0, variance 2 / fan_out: torchvision's VGG and ResNet."""
    nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")


@torch.no_grad()
def positive_unitball(weight: Tensor) -> None:
    nn.init.uniform_(weight)
    weight.div_(weight.flatten(1).sum(1).view(-1, *[1] * (weight.dim() - 1)))


@torch.no_grad()
def bilinear(weight: Tensor) -> None:
    size = weight.shape[-1]
    half = math.ceil(size / 2)
    center = (2 * half - 1 - half % 2) / (2 * half)
    line = 1 - (torch.arange(size, device=weight.device) / half - center).abs()
    weight.copy_(line[:, None] * line)


def filler(message: Message, default: float = 0.0) -> Fill:
    """Return the filler that a message describes. An empty one is constant, `default`."""
    kind = message.text("type", "constant")
    if kind not in FILLERS:
        raise message.error(f'there is no filler "{kind:.40}"; known: {", ".join(FILLERS)}', "type")
    message.ignore(*WORDS)  # Caffe also ignores the fields that a filler does not use
    if not message.fields:
        return constant(default)
    return FILLERS[kind](message)


def _uniform_of(message: Message) -> Fill:
    low, high = message.number("min", 0.0), message.number("max", 1.0)
    if not -LARGEST <= low <= high <= LARGEST:
        raise message.error(f"a uniform filler from {low:g} to {high:g}; expected min below max")
    return uniform(low, high)


def _gaussian_of(message: Message) -> Fill:
    std = message.number("std", 1.0)
    if not 0 <= std <= LARGEST:
        raise message.error(f"std is {std:g}; expected 0 or more", "std")
    return gaussian(std, message.number("mean", 0.0), message.integer("sparse", -1))


def _by_fan(fill: Callable[[Tensor, str], None], message: Message) -> Fill:
    norm = message.choice("variance_norm", VARIANCE_NORMS, "FAN_IN")
    return lambda weight: fill(weight, norm)


def _bilinear_of(message: Message) -> Fill:
    def fill(weight: Tensor) -> None:
        if weight.dim() != 4 or weight.shape[-1] != weight.shape[-2]:
            raise message.error(
                f"a bilinear filler needs square filters; found weights of {tuple(weight.shape)}"
            )
        bilinear(weight)

    return fill


WORDS = ("value", "min", "max", "mean", "std", "sparse", "variance_norm")

FILLERS: dict[str, Callable[[Message], Fill]] = {
    "constant": lambda message: constant(message.number("value", 0.0)),
    "uniform": _uniform_of,
    "gaussian": _gaussian_of,
    "xavier": partial(_by_fan, xavier),
    "msra": partial(_by_fan, msra),
    "positive_unitball": lambda message: positive_unitball,
    "bilinear": _bilinear_of,
}


def unfilled(layer: type[nn.Module], *sizes: Any, **words: Any) -> Any:
    """Make a torch layer without filling its parameters, which takes seconds for a large one."""
    device = torch.get_default_device()
    return skip_init(layer, *sizes, **words, device=device)  # type: ignore[no-untyped-call]


def fill(layer: nn.Module, weight: Fill, bias: float = 0.0) -> None:
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    weight(layer.weight)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)


def fill_all(module: nn.Module, weight: Fill, bias: float = 0.0) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fill(layer, weight, bias)
