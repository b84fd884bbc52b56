"""Axpy: a · x + y, with one a for each channel, in one layer.

Source: the fork of SENet (github.com/hujie-frank/SENet; arXiv 1709.01507).
"""

from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class Axpy(nn.Module):
    """(B, C) or (B, C, 1, 1), and two of (B, C, …): the first times the second plus the third."""

    def forward(self, scale: Tensor, values: Tensor, others: Tensor) -> Tensor:
        shape = (*values.shape[:2], *[1] * (values.dim() - 2))
        return scale.reshape(shape) * values + others


def axpy(spec: Spec) -> Axpy:
    check_bottoms(spec, 3)
    scale, values, others = map(tuple, spec.bottoms)
    if scale[:2] != values[:2] or any(size != 1 for size in scale[2:]) or values != others:
        raise spec.layer.error(
            f"Axpy {spec.name!r} has the bottoms {scale}, {values} and {others}; expected "
            "(B, C, 1, 1) and two of (B, C, H, W)"
        )
    return Axpy()


LAYERS = {"Axpy": Kind(axpy, "", ())}
