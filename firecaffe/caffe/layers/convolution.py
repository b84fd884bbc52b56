"""Convolution and Deconvolution, as torch's own modules.

Caffe's filters are (num_output, channels / group, rows, columns) as torch's; a deconvolution's are
(channels, num_output / group, rows, columns), as those of torch's transposed convolution.
"""

from typing import Any

from torch import Tensor, nn

from firecaffe.caffe.fillers import filler, unfilled
from firecaffe.caffe.layers.axis import axis_of, height_width, shown
from firecaffe.caffe.layers.spec import Kind, Spec


class Convolutions(nn.Conv2d):
    """The same filters over several bottoms, each to a top."""

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(super(Convolutions, self).forward(each) for each in bottoms)


class Deconvolutions(nn.ConvTranspose2d):
    """The same filters over several bottoms, each to a top."""

    def forward(self, *bottoms: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(super(Deconvolutions, self).forward(each) for each in bottoms)


def _make(spec: Spec, one: type[nn.Module], several: type[nn.Module]) -> nn.Module:
    param = spec.param
    param.ignore("engine", "force_nd_im2col")
    if not spec.bottoms or any(len(each) != 4 for each in spec.bottoms):
        found = ", ".join(map(shown, spec.bottoms)) or "nothing"
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} goes over {found}; expected batch x channels x rows x "
            "columns (convolutions of one and of three dimensions are not built)"
        )
    if axis_of(spec, "axis", 1, spec.bottoms[0]) != 1:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r}: expected axis 1, the channels", param.line_of("axis")
        )
    channels, outputs = spec.bottoms[0][1], param.integer("num_output")
    groups = param.integer("group", 1)
    if groups < 1 or outputs < 1 or outputs % groups or channels % groups:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} makes {outputs} channels of {channels} in {groups} groups; "
            "expected a num_output of at least 1, and both to be multiples of group",
            param.line_of("group" if param.has("group") else "num_output"),
        )
    sizes: dict[str, Any] = {
        "kernel_size": height_width(spec, "kernel_size", None, "kernel"),
        "stride": height_width(spec, "stride", 1),
        "padding": height_width(spec, "pad", 0),
        "dilation": height_width(spec, "dilation", 1),
    }
    has_bias = param.flag("bias_term", True)
    module = unfilled(
        one if len(spec.bottoms) == 1 else several,
        channels,
        outputs,
        **sizes,
        groups=groups,
        bias=has_bias,
    )
    filler(param.message("weight_filler"))(module.weight)
    fill_bias = filler(param.message("bias_filler"))
    if has_bias:
        fill_bias(module.bias)
    result: nn.Module = module
    return result


def convolution(spec: Spec) -> nn.Module:
    return _make(spec, nn.Conv2d, Convolutions)


def deconvolution(spec: Spec) -> nn.Module:
    return _make(spec, nn.ConvTranspose2d, Deconvolutions)


LAYERS = {
    "Convolution": Kind(convolution, "convolution_param"),
    "Deconvolution": Kind(deconvolution, "convolution_param"),
}
