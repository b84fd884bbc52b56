"""Parameter: a blob that is learned, and has no bottom.

Source: Caffe's API documentation (caffe.berkeleyvision.org/doxygen), ParameterLayer.
"""

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Shape, Spec


class Parameter(nn.Module):
    """forward(): the parameter itself. It starts at 0, as Caffe gives it no filler."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        return self.weight


def parameter(spec: Spec) -> Parameter:
    check_bottoms(spec, 0)
    shape = tuple(spec.param.message("shape").integers("dim"))
    if not all(size > 0 for size in shape):
        raise spec.param.error(f"shape is {shape}; expected sizes above 0")
    return Parameter(shape)


LAYERS = {"Parameter": Kind(parameter, "parameter_param", ("weight",))}
