"""A rank alone, which sends to itself; and buckets to try."""

from math import prod

import torch
from torch import Tensor

from firecaffe.exchange import leaves
from firecaffe.gradients.compressors.codec import ROW, BucketLayout, RowCodec


def tree_sum(values: list[Tensor]) -> Tensor:
    """The sum in tree order; nothing is written to."""
    return leaves.tree_sum(values, torch.add)


class LocalWire:
    """What `wire.Wire` asks for, on the only rank."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.own_nodes = range(num_nodes)
        self.sent_bytes = 0

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        return tree_sum(self.gather(vectors))

    def sum_rows(self, vectors: list[Tensor], codec: RowCodec) -> Tensor:
        encoded = self.gather([codec.encode(vector) for vector in vectors])
        assert all(node.shape[1] == codec.row_bytes for node in encoded)
        return codec.decode(codec.encode(tree_sum([codec.decode(node) for node in encoded])))

    def gather(self, payloads: list[Tensor], equal_lengths: bool = False) -> list[Tensor]:
        """Copies, as a network makes: what a rank writes to, no other rank sees."""
        assert len(payloads) == self.num_nodes
        assert not equal_lengths or len({tensor.numel() for tensor in payloads}) == 1
        self.sent_bytes += sum(tensor.nbytes for tensor in payloads)
        return [tensor.clone() for tensor in payloads]


def make_layouts(
    shapes: dict[str, tuple[int, ...]], buckets: list[list[str]]
) -> list[BucketLayout]:
    """Buckets of the named parameters, each beginning at a multiple of ROW."""
    layouts = []
    for names in buckets:
        spans, end = [], 0
        for name in names:
            begin = -(-end // ROW) * ROW
            end = begin + prod(shapes[name])
            spans.append((begin, end))
        layouts.append(
            BucketLayout(tuple(names), tuple(spans), tuple(shapes[name] for name in names))
        )
    return layouts


def flatten(layout: BucketLayout, values: dict[str, Tensor]) -> Tensor:
    """One bucket's flat vector, zeros between tensors, a multiple of ROW long."""
    vector = torch.zeros(-(-layout.spans[-1][1] // ROW) * ROW)
    for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
        vector[start:stop] = values[name].reshape(-1)
    return vector


def unflatten(layout: BucketLayout, vector: Tensor) -> dict[str, Tensor]:
    """The parameters' parts, each of shape (elements,). Between them are zeros."""
    rest = vector.clone()
    parts = {}
    for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
        parts[name] = vector[start:stop].clone()
        rest[start:stop] = 0
    assert not rest.any()
    return parts
