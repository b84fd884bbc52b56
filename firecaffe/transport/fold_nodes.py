"""Sums and gathers of nodes of the micro-batch tree, by the schedule of `exchange.fold`.

A rank may hold several nodes, and nodes may be encoded on the way. Encoded nodes are decoded and
added, and the total is encoded for the way back, even on a single rank.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange import fold
from firecaffe.exchange.leaves import Node, Shares, equal_shares, sum_of_nodes
from firecaffe.exchange.schedule import REDUCE_SCATTER, Schedule
from firecaffe.transport.run_schedule import Begun, Collectives


class RowCoding(Protocol):
    """A codec that encodes each row by itself; see `gradients.compressors.codec.RowCodec`."""

    @property
    def row_elements(self) -> int: ...
    @property
    def encode(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def decode(self) -> Callable[[Tensor], Tensor]: ...


class NodeSum:
    """Computes the root over all ranks' nodes, the same bits on all; for one thread at a time."""

    def __init__(
        self,
        world: Group,
        nodes_of_rank: Sequence[Sequence[Node]],
        num_leaves: int,
        early: bool = False,
    ) -> None:
        """Take each rank's nodes, together the whole tree. early: `begin` sends early nodes."""
        self.world = world
        self.num_leaves = num_leaves
        self.nodes_of_rank = nodes_of_rank
        self._nodes = [node for owned in nodes_of_rank for node in owned]
        self.num_early = fold.num_early(nodes_of_rank) if early else 0
        """The number of early rounds, which is that of `begin` calls before each `finish`."""
        self._collectives = Collectives(world)

    @property
    def seconds(self) -> float:
        return self._collectives.seconds

    @property
    def own_nodes(self) -> Sequence[Node]:
        return self.nodes_of_rank[self.world.rank]

    @property
    def own_early(self) -> Sequence[Node]:
        """This rank's nodes that `begin` sends, one after the other."""
        return fold.early_nodes(self.own_nodes, self.num_leaves) if self.num_early else []

    def begin(
        self,
        number: int,
        vectors: Mapping[Node, Tensor],
        like: Tensor,
        place: Hashable,
        begun: Begun | None,
        cuts: Sequence[int] = (),
    ) -> Begun:
        """Send an early node of this rank, and receive the others'. Raises: PeerLostError.

        All ranks call it, even without a node. vectors: the node's, kept until the sum. like: any
        vector of that length. place: a key for scratch, one for each sum under way. cuts: of the
        `to_owners` that follows.
        """
        name, make = self._to_owners(cuts) if cuts else (1, self._make(1))
        inputs = self._inputs(vectors)
        return self._collectives.begin(name, make, like, inputs, number, place, begun)

    def finish(self, vectors: Mapping[Node, Tensor], begun: Begun | None) -> Tensor:
        """Return the root, from nodes not sent early and those sent. Raises: PeerLostError."""
        return self._sum(self._inputs(vectors), 1, self._add, begun)

    def to_owners(
        self,
        vectors: Mapping[Node, Tensor],
        total: Tensor,
        cuts: Sequence[int] = (),
        begun: Begun | None = None,
    ) -> None:
        """Write this rank's shard of the root into `total`, which may be one of the vectors.

        vectors: those not sent early, which may be changed. cuts: ends of shards, from 0; none if
        they are equal. Raises: PeerLostError.
        """
        name, make = self._to_owners(cuts)
        inputs = self._inputs(vectors)
        self._collectives.run(name, make, total, inputs=inputs, sum_inputs=self._add, begun=begun)

    def __call__(self, vectors: Sequence[Tensor], codec: RowCoding | None = None) -> Tensor:
        """Return the root. A codec needs whole rows; vectors may change. Raises: PeerLostError."""
        if codec is None:
            return self._sum(dict(enumerate(vectors)), 1, self._add)
        encoded = [codec.encode(vector) for vector in vectors]
        rows = encoded[0].shape
        grain = encoded[0].numel() // rows[0] if rows[0] else 1
        flat = [payload.reshape(-1) for payload in encoded]

        def add(parts: Sequence[Tensor]) -> Tensor:
            decoded = [codec.decode(part.view(-1, *rows[1:])) for part in parts]
            return codec.encode(self._add(decoded)).reshape(-1)

        return codec.decode(self._sum(dict(enumerate(flat)), grain, add).view(rows))

    def scattered(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return this rank's shard of the root; `vectors` may be changed. Raises: PeerLostError."""
        total = vectors[0].new_empty(vectors[0].numel())
        self.to_owners(dict(zip(self.own_nodes, vectors, strict=True)), total)
        return total.view(self.world.world_size, -1)[self.world.rank]

    def _sum(
        self,
        inputs: Mapping[int, Tensor],
        grain: int,
        add: Callable[[Sequence[Tensor]], Tensor],
        begun: Begun | None = None,
    ) -> Tensor:
        vectors = list(inputs.values())
        if self.world.exchange_group is None:
            return add(vectors)
        total = vectors[0].new_empty(vectors[0].numel())
        make = self._make(grain)
        self._collectives.run(grain, make, total, inputs=inputs, sum_inputs=add, begun=begun)
        return total

    def _inputs(self, vectors: Mapping[Node, Tensor]) -> dict[int, Tensor]:
        return {self.own_nodes.index(node): vector for node, vector in vectors.items()}

    def _to_owners(self, cuts: Sequence[int]) -> tuple[Hashable, Callable[[int], Schedule]]:
        make = partial(
            fold.reduce_scatter,
            self.nodes_of_rank,
            self.num_leaves,
            early=self.num_early > 0,
            cuts=cuts,
        )
        return (REDUCE_SCATTER, tuple(cuts)), make

    def _make(self, grain: int) -> Callable[[int], Schedule]:
        early = self.num_early > 0
        return partial(fold.schedule, self.nodes_of_rank, self.num_leaves, grain=grain, early=early)

    def _add(self, parts: Sequence[Tensor]) -> Tensor:
        return sum_of_nodes(self._nodes, parts, self.num_leaves, Tensor.add_)


class NodeWire:
    """Sums one level's nodes in one thread; all ranks call the same methods in the same order."""

    def __init__(self, world: Group, num_nodes: int) -> None:
        self.world = world
        self.num_nodes = num_nodes
        self.set_shares(equal_shares(num_nodes, world.world_size))

    def set_shares(self, shares: Shares) -> None:
        """Give ranks other nodes. All ranks call it between the same two sums."""
        self.shares = shares
        nodes_of_rank = [[Node(0, index) for index in share] for share in shares]
        self._sum = NodeSum(self.world, nodes_of_rank, self.num_nodes)

    @property
    def own_nodes(self) -> list[int]:
        return list(self.shares[self.world.rank])

    def sum_nodes(self, vectors: list[Tensor]) -> Tensor:
        return self._sum(vectors)

    def sum_rows(self, vectors: list[Tensor], codec: RowCoding) -> Tensor:
        """Return the sum; nodes and total travel encoded, each row by itself."""
        num_elements = vectors[0].numel()
        missing = -num_elements % codec.row_elements
        if missing:
            vectors = [torch.nn.functional.pad(vector, (0, missing)) for vector in vectors]
        return self._sum(vectors, codec)[:num_elements]

    def gather(self, payloads: list[Tensor], equal_lengths: bool = False) -> list[Tensor]:
        """Return all nodes' payloads (uint8) in node order, from this rank's.

        equal_lengths: of all payloads, so that ranks need not exchange them.
        """
        group = self.world.exchange_group
        if group is None:
            return payloads
        device = payloads[0].device
        if equal_lengths:
            lengths = [[payloads[0].numel()] * len(share) for share in self.shares]
        else:
            lengths = self._lengths(payloads)
        longest = max(sum(of_rank) for of_rank in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        torch.cat(payloads, out=padded[: sum(p.numel() for p in payloads)])
        gathered = self._all_gather(padded)
        return [
            payload
            for row, of_rank in zip(gathered, lengths, strict=True)
            for payload in row[: sum(of_rank)].split_with_sizes(of_rank)
        ]

    def _lengths(self, payloads: list[Tensor]) -> list[list[int]]:
        counts = [len(share) for share in self.shares]
        own = torch.zeros(max(counts), dtype=torch.int64, device=payloads[0].device)
        for index, payload in enumerate(payloads):
            own[index] = payload.numel()
        rows = self._all_gather(own)
        return [row[:count].tolist() for row, count in zip(rows, counts, strict=True)]

    def _all_gather(self, vector: Tensor) -> list[Tensor]:
        """Gather vectors of equal length. In a ring every rank sends all of them but one."""
        rows = [torch.empty_like(vector) for _ in self.shares]
        with peers_may_be_lost(self.world):
            dist.all_gather(rows, vector, group=self.world.exchange_group)
        self.world.traffic.add((self.world.world_size - 1) * vector.nbytes)
        return rows
