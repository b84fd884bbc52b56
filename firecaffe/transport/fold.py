"""Sums over nodes of the micro-batch tree, by the schedule of `exchange.fold`.

A rank may hold several nodes, and nodes may be encoded on the way. What is encoded is added as
decoded, and the total encoded for the way back, also on one rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.exchange import fold
from firecaffe.exchange.leaves import Node, sum_of_nodes
from firecaffe.exchange.schedule import Schedule
from firecaffe.transport.collectives import Collectives


class RowCoding(Protocol):
    """A codec whose rows stand alone; see `gradients.compressors.codec.RowCodec`."""

    @property
    def row_elements(self) -> int: ...
    @property
    def encode(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def decode(self) -> Callable[[Tensor], Tensor]: ...


class NodeSum:
    """Computes the root over all ranks' nodes, the same bits on all ranks. Used by one thread at a
    time.
    """

    def __init__(
        self, world: Group, nodes_of_rank: Sequence[Sequence[Node]], num_leaves: int
    ) -> None:
        """nodes_of_rank: the nodes of each rank; in order they are the whole tree."""
        self.world = world
        self.num_leaves = num_leaves
        self.nodes_of_rank = nodes_of_rank
        self._nodes = [node for owned in nodes_of_rank for node in owned]
        self._collectives = Collectives(world)

    @property
    def own_nodes(self) -> Sequence[Node]:
        """This rank's nodes, in order."""
        return self.nodes_of_rank[self.world.rank]

    def __call__(self, vectors: Sequence[Tensor], codec: RowCoding | None = None) -> Tensor:
        """vectors: this rank's, one for each of its nodes, which may be changed; with a codec, of
        whole rows.

        Raises: PeerLostError.
        """
        if codec is None:
            return self._sum(vectors, 1, self._add)
        encoded = [codec.encode(vector) for vector in vectors]
        rows = encoded[0].shape
        grain = encoded[0].numel() // rows[0] if rows[0] else 1
        flat = [each.reshape(-1) for each in encoded]

        def add(parts: Sequence[Tensor]) -> Tensor:
            decoded = [codec.decode(part.view(-1, *rows[1:])) for part in parts]
            return codec.encode(self._add(decoded)).reshape(-1)

        return codec.decode(self._sum(flat, grain, add).view(rows))

    def _sum(
        self, vectors: Sequence[Tensor], grain: int, add: Callable[[Sequence[Tensor]], Tensor]
    ) -> Tensor:
        if self.world.exchange_group is None:
            return add(vectors)
        total = vectors[0].new_empty(vectors[0].numel())
        make = partial(_schedule, self.nodes_of_rank, self.num_leaves, grain)
        ranks = range(self.world.world_size)
        self._collectives.run(grain, make, total, ranks, inputs=vectors, sum_inputs=add)
        return total

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        return sum_of_nodes(self._nodes, parts, self.num_leaves, Tensor.add_)


def _schedule(
    nodes: Sequence[Sequence[Node]], num_leaves: int, grain: int, num_elements: int
) -> Schedule:
    return fold.schedule(nodes, num_leaves, num_elements, grain)
