"""Embed: the rows of a table that whole numbers choose.

Source: Caffe's API documentation (caffe.berkeleyvision.org/doxygen), EmbedLayer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from firecaffe.caffe.fillers import filler
from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import positive
from firecaffe.caffe.layers.spec import Kind, Spec


class Embed(nn.Module):
    """(…) of whole numbers below input_dim, of any type, to (…, num_output)."""

    def __init__(self, input_dim: int, num_output: int, bias_term: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(input_dim, num_output))
        self.bias = nn.Parameter(torch.zeros(num_output)) if bias_term else None

    def forward(self, indices: Tensor) -> Tensor:
        rows = functional.embedding(indices.long(), self.weight)
        return rows if self.bias is None else rows + self.bias


def embed(spec: Spec) -> Embed:
    check_bottoms(spec, 1)
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


LAYERS = {"Embed": Kind(embed, "embed_param")}
