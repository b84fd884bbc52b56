"""SPP: pooling into a pyramid of 1, 2 · 2, 4 · 4 … bins, whatever the size of the plane.

Sources: He et al. 2014 (arXiv 1406.4729). That a level's windows are ceil(size / bins) long, how
they are padded, and what an average divides by: Caffe's SPPLayer and PoolingLayer.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from firecaffe.caffe.layers.checks import check_bottoms, positive, want_axes
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
        high, wide = Windows(planes.shape[2], bins), Windows(planes.shape[3], bins)
        padding = (wide.before, wide.after, high.before, high.after)
        size = (high.length, wide.length)
        if self.pool == "MAX":
            return functional.max_pool2d(functional.pad(planes, padding, value=-math.inf), size)
        total = functional.avg_pool2d(functional.pad(planes, padding), size, divisor_override=1)
        return total / torch.outer(high.counts(planes), wide.counts(planes))


class Windows:
    """The windows of one level along one axis, one behind the other."""

    def __init__(self, size: int, bins: int) -> None:
        self.length = -(-size // bins)
        self.before = (self.length * bins - size + 1) // 2
        padded = size + 2 * self.before
        self.number = -(-(padded - self.length) // self.length) + 1
        if (self.number - 1) * self.length >= size + self.before:
            self.number -= 1  # it would lie in the padding behind
        self.after = self.number * self.length - size - self.before
        self.last = min(self.length, padded - (self.number - 1) * self.length)
        """How much of the last window is in the plane or its padding."""

    def counts(self, like: Tensor) -> Tensor:
        """What an average divides by, a window."""
        counts = like.new_full((self.number,), self.length)
        counts[-1] = self.last
        return counts


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
            windows = Windows(size, 2**level)
            if windows.before >= windows.length:
                raise param.error(
                    f"pyramid_height is {levels}; planes of {tuple(spec.bottoms[0][2:])} are too "
                    f"small for {2**level} bins a side, as the first would be padding alone",
                    param.line_of("pyramid_height"),
                )
    return SPP(levels, pool)


LAYERS = {"SPP": Kind(spp, "spp_param", ())}
