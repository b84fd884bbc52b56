"""The ways from this worker's nodes of one bucket to the total over all workers.

Each way is an object with `top_level` (where local sums stop; None: they go on as far as they can),
`takes_nodes` (whether it is given this worker's nodes one by one, or their sum), `lanes` (how many
buckets may be under way at once; bucket i goes by lane i mod lanes, and each lane has a thread),
`takes_means` (whether the gradients that it is given are divided by the step's weight already, or
the total is afterwards) and a call. The call finds this worker's last node in the bucket itself and
the others beside it, and leaves the total there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.exchange.fold import inputs_of
from firecaffe.exchange.leaves import Node, Shares, num_nodes
from firecaffe.gradients.buckets import Bucket
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.gradients.compressors.codec import Compressor
from firecaffe.transport.collectives import Begun
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.fold import NodeSum, NodeWire


class Combine(Protocol):
    """A way from nodes to their total; see the top of this file."""

    @property
    def top_level(self) -> int | None: ...
    @property
    def takes_nodes(self) -> bool: ...
    @property
    def lanes(self) -> int: ...
    @property
    def takes_means(self) -> bool: ...
    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        """nodes: this worker's, in order; the last one is the bucket's. Empty if it takes a sum."""


class AllReduce:
    """The way by the exchange's algorithm; each worker has one sum."""

    top_level = None
    takes_nodes = False
    takes_means = False

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.lanes = exchange.lanes

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        self.exchange.all_reduce(bucket.flat, index % self.lanes)


Cuts = Mapping[tuple[int, ...], Sequence[int]]
"""Where a bucket's shards begin and, last, end, by its members."""


class Fold:
    """The way for shares that are no subtrees: the tree goes on from all workers' largest nodes.

    A bucket with cuts is brought to the owners of its shards alone.
    """

    top_level = None
    takes_nodes = True
    lanes = 1
    takes_means = False

    def __init__(self, world: Group, num_leaves: int, shares: Shares, cuts: Cuts) -> None:
        self._cuts = cuts
        self._sum = NodeSum(world, inputs_of(num_leaves, shares), num_leaves, early=True)
        self.num_early = self._sum.num_early
        """The number of early rounds: of calls of `begin` for each bucket before its own call."""
        self.early = self._sum.own_early
        """This worker's nodes that leave in the first of them, in this order."""
        self._begun: dict[int, Begun] = {}

    def begin(self, number: int, index: int, nodes: dict[Node, Tensor], bucket: Bucket) -> None:
        """Does an early round of a bucket. nodes: this worker's node, if it has one for the round;
        not the bucket's vector."""
        begun = self._begun.pop(index, None) if number else None
        cuts = self._cuts.get(bucket.members, ())
        self._begun[index] = self._sum.begin(number, nodes, bucket.flat, index, begun, cuts)

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        if cuts := self._cuts.get(bucket.members):
            begun = self._begun.pop(index, None)
            self._sum.to_owners(dict(nodes), bucket.flat, cuts, begun)
            return
        if self.num_early:
            total = self._sum.finish(dict(nodes), self._begun.pop(index))
        else:
            total = self._sum([vector for _, vector in nodes])
        bucket.flat.copy_(total)


class Compressed:
    """The way of a compressor: nodes of one level of the tree, each encoded on its own, on one
    worker as on many. A codec keeps back part of a mean, for the next step may have another weight.
    """

    takes_nodes = True
    lanes = 1
    takes_means = True

    def __init__(
        self,
        world: Group,
        compressor: Compressor,
        num_leaves: int,
        level: int,
        num_parameters: int,
    ) -> None:
        self.compressor = compressor
        self.top_level = level
        self.num_parameters = num_parameters
        self.wire = NodeWire(world, num_nodes(num_leaves, level))
        self.memory = CodecMemory(compressor, self.wire.own_nodes)
        self._scale: Tensor | None = None
        self._before: dict[str, Tensor] = {}
        self._before_that: dict[str, Tensor] = {}
        """Kept for a step: a device may still read what was given back."""

    def share_out(self, shares: Shares) -> None:
        """Gives ranks other micro-batches, each those of whole nodes. All call it between steps.

        Raises: PeerLostError.
        """
        level = self.top_level
        nodes = tuple(range(each.start >> level, -(-each.stop >> level)) for each in shares)
        self.memory.move(self.wire.world, self.wire.shares, nodes)
        self.wire.share_out(nodes)

    def begin_step(self, scale: Tensor | None) -> None:
        """scale: what the step's gradients are multiplied by, shape (), if they are. The next
        step's may be another, and what is kept back goes on to it.
        """
        self._scale, self._before_that = scale, self._before
        if scale is not None:
            self._before = {name: each.clone() for name, each in self.compressor.state().items()}

    def undo_step(self) -> None:
        """Keeps back what was kept back before a step that has updated nothing."""
        self.compressor.load_state(self._before, self.wire.own_nodes)

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        vectors = [vector for _, vector in nodes]
        if bucket.members[0] >= self.num_parameters:  # the tail, which is not encoded
            bucket.flat.copy_(self.wire.sum_nodes(vectors))
            return
        if self._scale is not None:
            torch._foreach_div_(vectors, self._scale)
        numbered = [(node.index, vector) for node, vector in nodes]
        bucket.flat.copy_(self.compressor.reduce(index, numbered, self.wire))
        if self._scale is not None:
            bucket.flat.mul_(self._scale)


Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
"""A DDP communication hook: (state, bucket) -> the mean over ranks, to come."""


class Hooked:
    """The way by a DDP communication hook, torch's or a user's, in place of our exchange."""

    top_level = None
    takes_nodes = False
    lanes = 1
    takes_means = True

    def __init__(
        self,
        exchange: Exchange,
        state: object,
        hook: Hook,
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        self.exchange = exchange
        self.state = state
        self.hook = hook
        self.parameters = list(parameters)
        self._places = [
            index for index, bucket in enumerate(buckets) if bucket.members[0] < len(parameters)
        ]

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        if bucket.members[0] >= len(self.parameters):
            self.exchange.all_reduce(bucket.flat)
            return
        # A hook takes the mean over ranks of what each of them brings.
        bucket.flat.mul_(self.exchange.world.world_size)
        is_last = index == self._places[-1]
        view = HookBucket(bucket, self._places.index(index), is_last, self.parameters)
        self.exchange.world.traffic.add_unknown()
        with peers_may_be_lost(self.exchange.world, beside_own_code=True):
            mean = self.hook(self.state, view).wait()
        bucket.flat.copy_(mean)


class HookBucket:
    """A bucket as a hook sees it, with the methods of `torch.distributed.GradBucket`."""

    def __init__(
        self, bucket: Bucket, index: int, is_last: bool, parameters: Sequence[Tensor]
    ) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._parameters = parameters
        self._buffer = bucket.flat

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients, each contiguous whatever its memory format, as DDP cuts them: hooks take
        `view`s of them.
        """
        starts = [self._bucket.start(member) for member in self._bucket.members]
        return [
            self._buffer[start : start + view.numel()].view(view.shape)
            for start, view in zip(starts, self._bucket.views, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        return [self._parameters[member] for member in self._bucket.members]


def gradients_of(bucket: Bucket, num_parameters: int) -> Tensor:
    """The part of a bucket's vector before the tail, whose members stand last."""
    tails = [member for member in bucket.members if member >= num_parameters]
    return bucket.flat[: bucket.start(tails[0])] if tails else bucket.flat
