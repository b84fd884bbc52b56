"""Caffe's weight fillers, so that a network starts where its authors' file starts it.

fan_in is the number of inputs that one output sums: in_channels / groups x kernel height x kernel
width for a convolution, in_features for a fully connected layer.

Source: Caffe's include/caffe/filler.hpp (GaussianFiller, XavierFiller, MSRAFiller with the default
variance norm FAN_IN). Xavier there means Glorot and Bengio 2010 with fan_in alone; MSRA is
He et al. 2015 (arXiv 1502.01852).
"""

import math
from collections.abc import Callable

from torch import Tensor, nn


def _fan_in(weight: Tensor) -> int:
    return math.prod(weight.shape[1:])


def gaussian(std: float) -> Callable[[Tensor], None]:
    """Normal, mean 0, the given standard deviation."""

    def fill(weight: Tensor) -> None:
        nn.init.normal_(weight, 0.0, std)

    return fill


def xavier(weight: Tensor) -> None:
    """Uniform on ±sqrt(3 / fan_in), so that the variance is 1 / fan_in."""
    bound = math.sqrt(3 / _fan_in(weight))
    nn.init.uniform_(weight, -bound, bound)


def msra(weight: Tensor) -> None:
    """Normal, mean 0, variance 2 / fan_in."""
    nn.init.normal_(weight, 0.0, math.sqrt(2 / _fan_in(weight)))


def msra_fan_out(weight: Tensor) -> None:
    """Normal, mean 0, variance 2 / fan_out: torchvision's choice for VGG and ResNet."""
    nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")


def fill(layer: nn.Module, weight: Callable[[Tensor], None], bias: float = 0.0) -> None:
    """Fill one convolution or fully connected layer in place; a layer without bias has none set.

    On the meta device this does nothing, as there is nothing to fill.
    """
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    weight(layer.weight)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)


def fill_all(module: nn.Module, weight: Callable[[Tensor], None], bias: float = 0.0) -> None:
    """`fill` every convolution and fully connected layer in `module`, in network order."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fill(layer, weight, bias)
