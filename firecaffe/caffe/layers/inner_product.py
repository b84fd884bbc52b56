"""InnerProduct: a fully connected layer over all axes from `axis` on.

Caffe flattens channels, rows and columns in that order, which is torch's. Its weights are
(num_output, inputs), as torch's; with `transpose` they are (inputs, num_output).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.fillers import filler, unfilled
from firecaffe.caffe.layers.axis import axis_of, check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class InnerProductFrom(nn.Linear):
    """Over the axes from `axis` on, of which there may be several."""

    def __init__(self, inputs: int, outputs: int, axis: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(self.axis))


class TransposedInnerProduct(nn.Module):
    """With weights of (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, axis: int, bias: bool) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(self.axis), self.weight.t(), self.bias)


def inner_product(spec: Spec) -> nn.Module:
    """A plain nn.Linear over (batch, inputs) where that is enough: the net flattens what goes into
    one, so that all that knows nn.Linear knows it.
    """
    check_bottoms(spec, 1)
    param = spec.param
    param.ignore("engine")
    bottom = spec.bottoms[0]
    axis = axis_of(spec, "axis", 1, bottom)
    outputs, inputs = param.integer("num_output"), math.prod(bottom[axis:])
    if outputs < 1:
        raise spec.layer.error(f"InnerProduct {spec.name!r}: num_output is {outputs}")
    has_bias = param.flag("bias_term", True)
    module: nn.Linear | TransposedInnerProduct
    if param.flag("transpose"):
        module = TransposedInnerProduct(inputs, outputs, axis, has_bias)
    elif axis != 1:
        module = InnerProductFrom(inputs, outputs, axis, has_bias)
    else:
        module = unfilled(nn.Linear, inputs, outputs, bias=has_bias)
    filler(param.message("weight_filler"))(module.weight)
    fill_bias = filler(param.message("bias_filler"))
    if module.bias is not None:
        fill_bias(module.bias)
    return module


LAYERS = {"InnerProduct": Kind(inner_product, "inner_product_param")}
