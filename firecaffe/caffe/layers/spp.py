"""SPP: pooling into a pyramid of 1, 2 · 2, 4 · 4 … bins, whatever the size of the plane.

Sources: He et al. 2014 (arXiv 1406.4729). That a level's windows are ceil(size / bins) long, how
they are padded, and what an average divides by: Caffe's SPPLayer and PoolingLayer.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import positive, want_axes
from firecaffe.caffe.layers.spec import Kind, Spec

POOLS = ("MAX", "AVE", "STOCHASTIC")


class SPP(nn.Module):
    """(B, C, H, W) to (B, sum of C · bins over the levels); (B, C, 1, 1) for a single level."""

    def __init__(self, levels: int, pool: str) -> None:
        super().__init__()
        self.levels, self.pool = levels, pool

    def forward(self, planes: Tensor) -> Tensor:
        pooled = [self.level(planes, 2**level) for level in range(self.levels)]
        return pooled[0] if self.levels == 1 else torch.cat([p.flatten(1) for p in pooled], 1)

    def level(self, planes: Tensor, bins: int) -> Tensor:
        rows, columns = planes.shape[2:]
        high, above, below = windows(rows, bins)
        wide, left, right = windows(columns, bins)
        fill = -math.inf if self.pool == "MAX" else 0.0
        padded = functional.pad(planes, (left, right, above, below), value=fill)
        if self.pool == "MAX":
            return functional.max_pool2d(padded, (high, wide))
        return functional.avg_pool2d(padded, (high, wide))


def windows(size: int, bins: int) -> tuple[int, int, int]:
    """How long each window is, and how much is added before the plane and behind it, so that there
    are `bins` of them. An average counts what is added.
    """
    length = -(-size // bins)
    missing = length * bins - size
    return length, (missing + 1) // 2, missing // 2


def spp(spec: Spec) -> SPP:
    check_bottoms(spec, 1)
    want_axes(spec, 4)
    param, levels = spec.param, positive(spec, "pyramid_height")
    param.ignore("engine")
    pool = param.choice("pool", POOLS, "MAX")
    if pool == "STOCHASTIC":
        raise param.error("pool is STOCHASTIC; expected MAX or AVE", param.line_of("pool"))
    for level in range(levels):
        for size in spec.bottoms[0][2:]:
            length, before, _ = windows(size, 2**level)
            if before >= length:
                raise param.error(
                    f"pyramid_height is {levels}; planes of {tuple(spec.bottoms[0][2:])} are too "
                    f"small for {2**level} bins a side, as the first would be padding alone",
                    param.line_of("pyramid_height"),
                )
    return SPP(levels, pool)


LAYERS = {"SPP": Kind(spp, "spp_param", ())}
