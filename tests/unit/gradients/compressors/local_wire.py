"""Ranks in one process: a thread each, which swap tensors at a barrier; and buckets to try."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from firecaffe.exchange.leaves import Node, TreeSum, leaf_share
from firecaffe.gradients.compressors.codec import ROW, Layout, RowCodec

T = TypeVar("T")


def tree_sum(values: list[Tensor]) -> Tensor:
    """The sum in tree order; nothing is written to."""
    counter: TreeSum[Tensor] = TreeSum(len(values), torch.add)
    for index, value in enumerate(values):
        counter.push(Node(0, index), value)
    return counter.total()


class LocalWire:
    """What `wire.Wire` asks for. Ranks share out rows, as evenly as they can."""

    def __init__(self, world_size: int, rank: int, num_nodes: int, board: "Board") -> None:
        self.num_nodes = num_nodes
        self.own_nodes = leaf_share(num_nodes, world_size, rank)
        self._world_size, self._rank, self._board = world_size, rank, board
        self.sent_bytes = 0

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        return tree_sum(self._swap_nodes(vectors))

    def sum_rows(self, vectors: list[Tensor], codec: RowCodec) -> Tensor:
        encoded = self._swap_nodes([codec.encode(vector) for vector in vectors])
        rows = leaf_share(len(encoded[0]), self._world_size, self._rank)
        own_rows = [codec.decode(node[rows.start : rows.stop]) for node in encoded]
        assert all(node.shape[1] == codec.row_bytes for node in encoded)
        shards = self._board.swap(self._rank, codec.encode(tree_sum(own_rows)))
        return codec.decode(torch.cat(shards))

    def gather(self, payloads: list[Tensor]) -> list[Tensor]:
        return self._swap_nodes(payloads)

    def _swap_nodes(self, own: list[Tensor]) -> list[Tensor]:
        assert len(own) == len(self.own_nodes)
        self.sent_bytes += sum(tensor.nbytes for tensor in own)
        # Copies, as a network makes: what a rank writes to, no other rank sees.
        swapped = self._board.swap(self._rank, [tensor.clone() for tensor in own])
        return [tensor.clone() for tensors in swapped for tensor in tensors]


class Board:
    """Where threads leave a value each and take those of all."""

    def __init__(self, world_size: int) -> None:
        self._values: list[Any] = [None] * world_size
        self.barrier = Barrier(world_size)

    def swap(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self.barrier.wait(timeout=300)
        values = list(self._values)
        self.barrier.wait(timeout=300)
        return values


def run_ranks(world_size: int, num_nodes: int, function: Callable[[LocalWire], T]) -> list[T]:
    """function(wire) on every rank at once; the results in order of rank."""
    board = Board(world_size)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return function(LocalWire(world_size, rank, num_nodes, board))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def make_layouts(shapes: dict[str, tuple[int, ...]], buckets: list[list[str]]) -> list[Layout]:
    """Buckets of the named parameters, each beginning at a multiple of ROW."""
    layouts = []
    for names in buckets:
        spans, end = [], 0
        for name in names:
            begin = -(-end // ROW) * ROW
            end = begin + prod(shapes[name])
            spans.append((begin, end))
        layouts.append(Layout(tuple(names), tuple(spans), tuple(shapes[name] for name in names)))
    return layouts


def flatten(layout: Layout, values: dict[str, Tensor]) -> Tensor:
    """One bucket's flat vector, zeros between tensors, a multiple of ROW long."""
    vector = torch.zeros(-(-layout.spans[-1][1] // ROW) * ROW)
    for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
        vector[start:stop] = values[name].reshape(-1)
    return vector


def unflatten(layout: Layout, vector: Tensor) -> dict[str, Tensor]:
    """The parameters' parts, each of shape (elements,). Between them are zeros."""
    rest = vector.clone()
    parts = {}
    for name, (start, stop) in zip(layout.names, layout.spans, strict=True):
        parts[name] = vector[start:stop].clone()
        rest[start:stop] = 0
    assert not rest.any()
    return parts
