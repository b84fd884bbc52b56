"""Convolution, Deconvolution, InnerProduct and Embed; Crop, Interp and Upsample of planes.

Caffe's filters have torch's shapes: (num_output, channels / group, rows, columns), and (channels,
num_output / group, rows, columns) for a deconvolution. ConvolutionDepthwise
(github.com/xieguotian/caffe) and DepthwiseConvolution (github.com/yonghenglh6/DepthwiseConvolution)
have one group and one output per channel, whatever `group` says. Crop cuts the axes from `axis` on
(caffe.berkeleyvision.org/tutorial/layers/crop.html); `offset` is absent, one for all axes, or one
for each. Interp aligns the corners of both planes. It is from the forks of DeepLab
(github.com/gpapan/caffe) and PSPNet (github.com/hszhao/PSPNet), which uses shrink_factor and
zoom_factor together. Upsample repeats each value (github.com/eric612/MobileNet-YOLO), or puts it
where a second bottom says (github.com/alexgkendall/caffe-segnet).

InnerProduct is a fully connected layer over all axes from `axis` on, and Embed a table of rows.
Caffe flattens channels, rows and columns in torch's order. Its weights are (num_output, inputs)
like torch's, or (inputs, num_output) with `transpose`. Source for Embed:
caffe.berkeleyvision.org/doxygen.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.fillers import unfilled
from firecaffe.caffe.layers.spec import ENGINE, Function, Kind, Spec, shown
from firecaffe.caffe.message import Field


class Convolutions(nn.Conv2d):
    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(super(Convolutions, self).forward(bottom) for bottom in bottoms)


class Deconvolutions(nn.ConvTranspose2d):
    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(super(Deconvolutions, self).forward(bottom) for bottom in bottoms)


def convolution(
    spec: Spec, one: type[nn.Module] = nn.Conv2d, several: type[nn.Module] = Convolutions
) -> nn.Module:
    param = spec.param
    if not spec.bottoms or any(len(bottom) != 4 for bottom in spec.bottoms):
        shapes = ", ".join(map(shown, spec.bottoms)) or "nothing"
        raise spec.error(
            f" goes over {shapes}; expected batch x channels x rows x "
            "columns (convolutions of one and of three dimensions are not built)"
        )
    if spec.axis("axis", 1) != 1:
        raise spec.error(": expected axis 1, the channels", "axis")
    channels, outputs = spec.bottoms[0][1], param.integer("num_output")
    groups = param.integer("group", 1)
    if groups < 1 or outputs < 1 or outputs % groups or channels % groups:
        raise spec.error(
            f" makes {outputs} channels of {channels} in {groups} groups; "
            "expected a num_output of at least 1, and both to be multiples of group",
            "group" if param.has("group") else "num_output",
        )
    sizes: dict[str, Any] = {
        "kernel_size": spec.height_width("kernel_size", None, "kernel"),
        "stride": spec.height_width("stride", 1),
        "padding": spec.height_width("pad", 0),
        "dilation": spec.height_width("dilation", 1),
    }
    for name, pair in sizes.items():
        least = 0 if name == "padding" else 1
        if min(pair) < least:
            raise spec.error(f" has a {name} of {shown(pair)}; expected {least} or more")
    module = unfilled(
        one if len(spec.bottoms) == 1 else several,
        channels,
        outputs,
        **sizes,
        groups=groups,
        bias=param.flag("bias_term", True),
    )
    spec.fill("weight_filler", module.weight)
    spec.fill("bias_filler", module.bias)
    result: nn.Module = module
    return result


def depthwise(spec: Spec) -> nn.Module:
    spec.check_axes(4)
    param, channels = spec.param, spec.bottoms[0][1]
    outputs = param.integer("num_output", channels)
    if outputs != channels:
        raise spec.error(f" makes {outputs} channels of {channels}; expected as many", "num_output")
    added = [Field(name, channels, param.line) for name in ("num_output", "group")]
    grouped = param.changed(added=added)
    module = convolution(replace(spec, param=grouped))
    param.ignore(*grouped.asked)
    return module


def _cropped(whole: Tensor, like: Tensor, axis: int, offsets: Sequence[int]) -> Tensor:
    """Cut the first bottom to the second's sizes from `axis` on, at one offset for each axis."""
    for place, offset in enumerate(offsets, axis):
        whole = whole.narrow(place, offset, like.shape[place])
    return whole


def crop(spec: Spec) -> Function:
    whole, like = spec.bottoms
    axis, offsets = spec.axis("axis", 2), spec.param.integers("offset")
    count = len(whole) - axis
    if len(offsets) <= 1:
        offsets = (offsets or [0]) * count
    if len(offsets) != count:
        raise spec.param.error(
            f"{len(offsets)} offsets; expected 1, or {count} for the axes {axis} to "
            f"{len(whole) - 1}",
            "offset",
        )
    if len(like) != len(whole):
        raise spec.error(
            f" cuts {tuple(whole)} to the size of {tuple(like)}; expected as many axes"
        )
    for place, offset in enumerate(offsets, axis):
        if offset < 0 or offset + like[place] > whole[place]:
            raise spec.param.error(
                f"axis {place} of {spec.name!r} is cut to {like[place]} from {offset} on; the "
                f"bottom has {whole[place]}",
                "offset",
            )
    return Function(_cropped, axis=axis, offsets=offsets)


def _interpolated(
    planes: Tensor, shrink: int, zoom: int, size: tuple[int, int] | None, cut: tuple[int, int]
) -> Tensor:
    """Cut the border of (B, C, H, W), and resize the rest to `size`, or by shrink and zoom."""
    sides = [length - sum(cut) for length in planes.shape[2:]]
    planes = planes.narrow(2, cut[0], sides[0]).narrow(3, cut[0], sides[1])
    by_factors = [(length - 1) // shrink * zoom + 1 for length in sides]
    return F.interpolate(planes, size or by_factors, mode="bilinear", align_corners=True)


def _unpooled(planes: Tensor, places: Tensor, size: tuple[int, int]) -> Tensor:
    """Place values in a larger plane of zeros, at the indices (B, C, H, W) of the second bottom."""
    height, width = size
    batch, channels = planes.shape[:2]
    larger = planes.new_zeros(batch, channels, height * width)
    larger = larger.scatter(2, places.flatten(2).long(), planes.flatten(2))
    return larger.view(batch, channels, height, width)


def interp(spec: Spec) -> Function:
    spec.check_axes(4)
    param = spec.param
    cut = (-param.integer("pad_beg"), -param.integer("pad_end"))
    if min(cut) < 0:
        name = "pad_beg" if cut[0] < 0 else "pad_end"
        raise param.error(f"{name} is {-min(cut)}; expected 0, or less to cut the border", name)
    height, width = spec.bottoms[0][2] - sum(cut), spec.bottoms[0][3] - sum(cut)
    if min(height, width) < 1:
        raise param.error(
            f"pad_beg and pad_end of {spec.name!r} leave nothing of {tuple(spec.bottoms[0])}"
        )
    size = None
    if param.has("height") or param.has("width"):
        size = (spec.positive("height"), spec.positive("width"))
    has_factor = param.has("shrink_factor") or param.has("zoom_factor")
    if has_factor == (size is not None):
        raise spec.error(
            f" needs height and width, or shrink_factor or zoom_factor; "
            f"found {'both' if has_factor else 'neither'}"
        )
    shrink, zoom = spec.positive("shrink_factor", 1), spec.positive("zoom_factor", 1)
    return Function(_interpolated, shrink=shrink, zoom=zoom, size=size, cut=cut)


def upsample(spec: Spec) -> nn.Module:
    spec.check_axes(4)
    if len(spec.bottoms) == 1:
        return nn.Upsample(scale_factor=spec.positive("scale", 2))
    return Function(_unpooled, size=unpooled_size(spec))


def unpooled_size(spec: Spec) -> tuple[int, int]:
    param = spec.param
    if tuple(spec.bottoms[0]) != tuple(spec.bottoms[1]):
        raise spec.error(
            f" has values {tuple(spec.bottoms[0])} and places "
            f"{tuple(spec.bottoms[1])}; expected the same shape"
        )
    if param.has("upsample_h") or param.has("upsample_w"):
        param.ignore("scale", "scale_h", "scale_w", "pad_out_h", "pad_out_w")
        return spec.positive("upsample_h"), spec.positive("upsample_w")
    scale = spec.positive("scale", 2)
    height = spec.bottoms[0][2] * spec.positive("scale_h", scale)
    width = spec.bottoms[0][3] * spec.positive("scale_w", scale)
    return height - param.flag("pad_out_h"), width - param.flag("pad_out_w")


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
    """Make a plain nn.Linear if possible, since other code knows it; the net flattens its input."""
    param = spec.param
    axis = spec.axis("axis", 1)
    outputs, inputs = param.integer("num_output"), math.prod(spec.bottoms[0][axis:])
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
    spec.fill("weight_filler", module.weight)
    spec.fill("bias_filler", module.bias)
    return module


class Embed(nn.Module):
    """Map integers (…) below input_dim, of any dtype, to rows (…, num_output)."""

    def __init__(self, input_dim: int, num_output: int, bias_term: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(input_dim, num_output))
        self.bias = nn.Parameter(torch.zeros(num_output)) if bias_term else None

    def forward(self, indices: Tensor) -> Tensor:
        rows = F.embedding(indices.long(), self.weight)
        return rows if self.bias is None else rows + self.bias


def embed(spec: Spec) -> Embed:
    param = spec.param
    module = Embed(
        spec.positive("input_dim"), spec.positive("num_output"), param.flag("bias_term", True)
    )
    spec.fill("weight_filler", module.weight)
    if module.bias is not None:
        spec.fill("bias_filler", module.bias)
    else:
        param.ignore("bias_filler")
    return module


IGNORED = (*ENGINE, "force_nd_im2col")
LAYERS = {
    "Convolution": Kind(convolution, "convolution_param", bottoms=(), ignored=IGNORED),
    "Deconvolution": Kind(
        partial(convolution, one=nn.ConvTranspose2d, several=Deconvolutions),
        "convolution_param",
        bottoms=(),
        ignored=IGNORED,
    ),
    "ConvolutionDepthwise": Kind(depthwise, "convolution_param", ignored=IGNORED),
    "DepthwiseConvolution": Kind(depthwise, "convolution_param", ignored=IGNORED),
    "Crop": Kind(crop, "crop_param", (), bottoms=(2,)),
    "Interp": Kind(interp, "interp_param", ()),
    "Upsample": Kind(upsample, "upsample_param", (), bottoms=(1, 2)),
    "InnerProduct": Kind(inner_product, "inner_product_param", ignored=ENGINE),
    "Embed": Kind(embed, "embed_param"),
}
