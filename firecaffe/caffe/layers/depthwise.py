"""Convolutions of forks that have a group for each channel, whatever `group` says.

Sources of the facts: ConvolutionDepthwise, github.com/xieguotian/caffe; DepthwiseConvolution,
github.com/yonghenglh6/DepthwiseConvolution. Both make as many channels as come in.
"""

from dataclasses import replace

from torch import nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import want_axes
from firecaffe.caffe.layers.convolution import convolution
from firecaffe.caffe.layers.spec import Kind, Spec
from firecaffe.caffe.message import Field, Message


def depthwise(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    want_axes(spec, 4)
    param, channels = spec.param, spec.bottoms[0][1]
    outputs = param.integer("num_output", channels)
    if outputs != channels:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} makes {outputs} channels of {channels}; expected as many",
            param.line_of("num_output"),
        )
    own = [Field(name, channels, param.line) for name in ("num_output", "group")]
    grouped = Message([*param.fields, *own], param.line, param.where)
    module = convolution(replace(spec, param=grouped))
    param.ignore(*grouped.asked)
    return module


LAYERS = {
    "ConvolutionDepthwise": Kind(depthwise, "convolution_param"),
    "DepthwiseConvolution": Kind(depthwise, "convolution_param"),
}
