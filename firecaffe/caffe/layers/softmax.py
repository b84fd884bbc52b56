"""Softmax along one axis."""

from torch import nn

from firecaffe.caffe.layers.axis import axis_of, check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


def softmax(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    spec.param.ignore("engine")
    return nn.Softmax(dim=axis_of(spec, "axis", 1, spec.bottoms[0]))


LAYERS = {"Softmax": Kind(softmax, "softmax_param")}
