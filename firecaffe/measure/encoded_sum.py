"""Compressed sums for `firecaffe bench exchange`: the bytes they send and their error bounds."""

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt, sqrt

import torch
from torch import Tensor

from firecaffe.cluster.group import Traffic
from firecaffe.cluster.world import World
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW, Layout
from firecaffe.gradients.compressors.top_k import num_sent
from firecaffe.measure.exchange_times import Encoder
from firecaffe.transport.fold_nodes import NodeWire

ROUNDING = {
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    # Each element is off by at most half a step, and a step is 1/127 of the row's largest
    # element, which is at most the row's norm.
    "int8": sqrt(ROW) / 254,
}
"""Bound of the error of one encoding by rows, as a share of the vector's L2 norm."""


def error_bound(name: str, num_elements: int) -> float:
    """Bound a first sum's L2 error, as a multiple of the sum of the summands' norms.

    Row codecs encode twice: on the way out and as totals. Other codecs encode once, and what they
    decode is never farther from the vector than zero is.
    """
    if name in ROUNDING:
        return ROUNDING[name] * (2 + ROUNDING[name])
    # A part of the elements; or a mean for each sign, tau or times tau towards zero, a projection.
    return sqrt(1 - num_sent(num_elements) / num_elements) if name == "top_k" else 1.0


def make_encoders(names: Sequence[str]) -> dict[str, Encoder]:
    def encoder(name: str) -> Encoder:
        return lambda world, num_elements: OneNodeEach(world, name, num_elements)

    return {name: encoder(name) for name in names}


class OneNodeEach:
    """An `EncodedSum` through a compressor, whose memory lasts from sum to sum."""

    def __init__(self, world: World, name: str, num_elements: int) -> None:
        self.name = name
        self.bound = error_bound(name, num_elements)
        self._num_elements = num_elements
        self._rank = world.rank
        self._wire = NodeWire(replace(world, traffic=Traffic()), world.world_size)
        self._compressor = make_compressor(name, [layout(num_elements)])
        self._flat = torch.zeros(0)
        self.wire_bytes = 0

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._flat = torch.zeros(padded(num_elements), dtype=dtype, device=device)
        return self._flat[:num_elements]

    def all_reduce(self, vector: Tensor, lane: int = 0) -> None:
        """Sum in place. vector: the one that `empty` returned last."""
        before = self._wire.world.traffic.sent_bytes or 0
        total = self._compressor.reduce(0, [(self._rank, self._flat)], self._wire)
        vector.copy_(total[: self._num_elements])
        self._flat[self._num_elements :] = 0
        self.wire_bytes = (self._wire.world.traffic.sent_bytes or 0) - before

    def alone(self, vectors: Sequence[Tensor]) -> Tensor:
        missing = padded(self._num_elements) - self._num_elements
        nodes = [torch.nn.functional.pad(vector, (0, missing)) for vector in vectors]
        wire = NodeWire(World(0, 1, vectors[0].device), len(vectors))
        compressor = make_compressor(self.name, [layout(self._num_elements)])
        return compressor.reduce(0, list(enumerate(nodes)), wire)[: self._num_elements]


def padded(num_elements: int) -> int:
    return -(-num_elements // ROW) * ROW


def layout(num_elements: int) -> Layout:
    """Lay out one parameter as a matrix that is nearly square, for which low rank sends least."""
    rows = next(rows for rows in range(isqrt(num_elements), 0, -1) if num_elements % rows == 0)
    return Layout(("vector",), ((0, num_elements),), ((rows, num_elements // rows),))
