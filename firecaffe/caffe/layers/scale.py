"""Scale and Bias: times, or plus, a blob along some axes: a learned one, or a second bottom."""

import torch
from torch import Tensor, nn

from firecaffe.caffe.fillers import filler
from firecaffe.caffe.layers.axis import axis_of, check_bottoms, shown
from firecaffe.caffe.layers.spec import Kind, Shape, Spec


def _over(factor: Tensor, ones: int) -> Tensor:
    """With so many axes of 1 behind, so that it goes along the axes before them."""
    return factor.reshape(*factor.shape, *[1] * ones)


class Scale(nn.Module):
    """Times `weight`, or times a second bottom, and plus `bias` if there is one.

    Args:
        shape: Of the factor.
        ones: How many axes of the bottom lie behind those of the factor.
    """

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
    """Plus `bias`, or plus a second bottom; the words as Scale's."""

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
    """The shape of the factor or summand, and how many axes lie behind it."""
    check_bottoms(spec, 1, 2)
    bottom = spec.bottoms[0]
    if len(spec.bottoms) == 2 and spec.bottoms[1] == ():
        return (), len(bottom)
    axis = axis_of(spec, "axis", 1, bottom)
    count = spec.param.integer("num_axes", 1)
    if len(spec.bottoms) == 2:
        count = len(spec.bottoms[1])
    stop = len(bottom) if count == -1 else axis + count
    shape = tuple(bottom[axis:stop])
    if count < -1 or stop > len(bottom):
        raise spec.layer.error(
            f"{spec.type} {spec.name!r}: {count} axes from {axis} on; its bottom has {len(bottom)}",
            spec.param.line_of("num_axes"),
        )
    if len(spec.bottoms) == 2 and spec.bottoms[1] != shape:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r}: its second bottom is {shown(spec.bottoms[1])}; expected "
            f"{shown(shape)}, as the first from axis {axis} on"
        )
    return shape, len(bottom) - stop


def scale(spec: Spec) -> nn.Module:
    shape, ones = _shape(spec)
    has_bias = spec.param.flag("bias_term")
    module = Scale(shape, ones, has_weight=len(spec.bottoms) == 1, has_bias=has_bias)
    fill_weight = filler(spec.param.message("filler"), 1.0)
    fill_bias = filler(spec.param.message("bias_filler"))
    if module.weight is not None:
        fill_weight(module.weight)
    if module.bias is not None:
        fill_bias(module.bias)
    return module


def bias(spec: Spec) -> nn.Module:
    shape, ones = _shape(spec)
    module = Bias(shape, ones, has_bias=len(spec.bottoms) == 1)
    fill = filler(spec.param.message("filler"))
    if module.bias is not None:
        fill(module.bias)
    return module


LAYERS = {
    "Bias": Kind(bias, "bias_param", ("bias",)),
    "Scale": Kind(scale, "scale_param"),
}
