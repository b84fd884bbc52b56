"""InnerProduct, a fully connected layer over all axes from `axis` on, and Embed, a table of rows.

Caffe flattens channels, rows and columns in torch's order. Its weights are (num_output, inputs)
like torch's, or (inputs, num_output) with `transpose`. Source for Embed:
caffe.berkeleyvision.org/doxygen.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional

from firecaffe.caffe.fillers import filler, unfilled
from firecaffe.caffe.layers.spec import Kind, Spec, axis_of, positive


class InnerProductFrom(nn.Linear):
    def __init__(self, inputs: int, outputs: int, axis: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(self.axis))


class TransposedInnerProduct(nn.Module):
    def __init__(self, inputs: int, outputs: int, axis: int, bias: bool) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(self.axis), self.weight.t(), self.bias)


def inner_product(spec: Spec) -> nn.Module:
    """Make a plain nn.Linear if possible, as other code knows it; the net flattens its input."""
    param = spec.param
    param.ignore("engine")
    bottom = spec.bottoms[0]
    axis = axis_of(spec, "axis", 1, bottom)
    outputs, inputs = param.integer("num_output"), math.prod(bottom[axis:])
    if outputs < 1:
        raise spec.error(f": num_output is {outputs}")
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


class Embed(nn.Module):
    """Map (…) of whole numbers below input_dim, of any type, to (…, num_output)."""

    def __init__(self, input_dim: int, num_output: int, bias_term: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(input_dim, num_output))
        self.bias = nn.Parameter(torch.zeros(num_output)) if bias_term else None

    def forward(self, indices: Tensor) -> Tensor:
        rows = functional.embedding(indices.long(), self.weight)
        return rows if self.bias is None else rows + self.bias


def embed(spec: Spec) -> Embed:
    param = spec.param
    module = Embed(
        positive(spec, "input_dim"), positive(spec, "num_output"), param.flag("bias_term", True)
    )
    filler(param.message("weight_filler"))(module.weight)
    if module.bias is not None:
        filler(param.message("bias_filler"))(module.bias)
    else:
        param.ignore("bias_filler")
    return module


LAYERS = {
    "InnerProduct": Kind(inner_product, "inner_product_param"),
    "Embed": Kind(embed, "embed_param"),
}
