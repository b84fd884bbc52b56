"""The ways to sum one bucket over all workers, and the gather of updated weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import peers_may_be_lost, waiting
from firecaffe.exchange import sharded_parameter_server
from firecaffe.exchange.collectives import half
from firecaffe.exchange.fold import inputs_of
from firecaffe.exchange.leaves import Node, Shares, num_nodes
from firecaffe.exchange.schedule import ALL_GATHER
from firecaffe.gradients.buckets import Bucket
from firecaffe.gradients.compressors.codec import Compressor
from firecaffe.gradients.shards import Shards
from firecaffe.transport.collect import HeldPart
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.fold_nodes import NodeSum, NodeWire
from firecaffe.transport.run_schedule import Begun, Collectives


class Combine:
    """A way to sum the workers' nodes of a bucket."""

    top_level: int | None = None
    """The tree level at which local sums stop; None: they continue as far as possible."""
    takes_nodes = False
    """Whether the call receives this worker's nodes one by one; otherwise their sum."""
    takes_means = False
    """Whether gradients are divided by the step's weight before the call, not afterwards."""
    lanes = 1
    """How many buckets may be under way at once; bucket i is in lane i mod lanes, a thread each."""
    early: Sequence[Node] = ()
    """This worker's nodes that `begin` sends, one after the other."""
    num_early = 0
    """The number of calls of `begin` for each bucket before its `__call__`."""
    memory: "CodecMemory | None" = None
    """The memory of what earlier steps have not sent, if gradients are encoded."""

    def set_shares(self, shares: Shares) -> None:
        """Give workers other shares. All ranks call it between the same two steps."""
        raise NotImplementedError

    def begin_step(self, scale: Tensor | None) -> None:
        """Begin a step. `scale`, shape (), multiplies its gradients, but not the memory."""

    def undo_step(self) -> None: ...

    def begin(self, number: int, index: int, nodes: dict[Node, Tensor], bucket: Bucket) -> None:
        """Run an early round of a bucket with this worker's node for the round, if it has one."""

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        """Replace the bucket's vector, which is the last of this worker's nodes, by the total."""
        raise NotImplementedError


class AllReduce(Combine):
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.lanes = exchange.lanes

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        self.exchange.all_reduce(bucket.flat, index % self.lanes)


Cuts = Mapping[tuple[int, ...], Sequence[int]]


class Fold(Combine):
    """Sums the largest nodes of all workers; a bucket with cuts goes only to its shards' owners."""

    takes_nodes = True

    def __init__(self, world: Group, num_leaves: int, shares: Shares, cuts: Cuts) -> None:
        self._world, self._num_leaves, self._cuts = world, num_leaves, cuts
        self.set_shares(shares)

    def set_shares(self, shares: Shares) -> None:
        inputs = inputs_of(self._num_leaves, shares)
        self._sum = NodeSum(self._world, inputs, self._num_leaves, early=True)
        self.early, self.num_early = self._sum.own_early, self._sum.num_early
        self._begun: dict[int, Begun] = {}

    def begin(self, number: int, index: int, nodes: dict[Node, Tensor], bucket: Bucket) -> None:
        begun = self._begun.pop(index, None) if number else None
        cuts = self._cuts.get(bucket.members, ())
        self._begun[index] = self._sum.begin(number, nodes, bucket.flat, index, begun, cuts)

    def __call__(self, index: int, nodes: list[tuple[Node, Tensor]], bucket: Bucket) -> None:
        begun = self._begun.pop(index, None)
        if cuts := self._cuts.get(bucket.members):
            self._sum.to_owners(dict(nodes), bucket.flat, cuts, begun)
        else:
            bucket.flat.copy_(self._sum.finish(dict(nodes), begun))


class CodecMemory:
    """A compressor's memory as a piece of the training's state, by NODE.PARAMETER.

    What is equal on all ranks is saved once.
    """

    held_by_all = False
    is_result = False

    def __init__(self, compressor: Compressor, own_nodes: Collection[int]) -> None:
        self._compressor, self._own_nodes = compressor, own_nodes

    def parts(self) -> dict[str, HeldPart]:
        return {name: HeldPart(tensor) for name, tensor in self._compressor.state().items()}

    def load(self, stored: Mapping[str, Tensor]) -> None:
        self._compressor.load_state(stored, self._own_nodes)

    def move(self, group: Group, before: Sequence[range], after: Sequence[range]) -> None:
        """Send memory to the new owners of nodes. All ranks call it. Raises PeerLostError."""
        state = self._compressor.state()
        self._own_nodes = after[group.rank]
        here = {name: tensor for name, tensor in state.items() if self._is_here(name)}
        for source, target in product(range(len(before)), range(len(after))):
            nodes = set(before[source]).intersection(after[target])
            if source == target or not nodes or group.rank not in (source, target):
                continue
            if group.rank == source:
                sent = {
                    name: tensor.cpu().clone() for name, tensor in state.items() if _of(name, nodes)
                }
                _send(group, target, save(sent))
            else:
                here |= load(_receive(group, source))
        self._compressor.load_state(here, self._own_nodes)

    def _is_here(self, name: str) -> bool:
        return not name.partition(".")[0].isdecimal() or _of(name, self._own_nodes)


def _of(name: str, nodes: Collection[int]) -> bool:
    node = name.partition(".")[0]
    return node.isdecimal() and int(node) in nodes


def _send(group: Group, target: int, data: bytes) -> None:
    """Send without checking the watch: Gloo closes a pair whose message is late."""
    with waiting(group), peers_may_be_lost(group):
        dist.send(torch.tensor([len(data)]), group=group.group, group_dst=target)
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.send(whole, group=group.group, group_dst=target)


def _receive(group: Group, source: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    with waiting(group), peers_may_be_lost(group):
        dist.recv(length, group=group.group, group_src=source)
        received = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(received, group=group.group, group_src=source)
    return received.numpy().tobytes()


class CompressedSum(Combine):
    """Sums with a compressor, which encodes each node by itself on any number of workers."""

    top_level: int
    memory: CodecMemory
    takes_nodes = True
    takes_means = True  # memory holds means, because the next step's weight may differ

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
        # Kept for one step more, because a device may still read these tensors.
        self._before_that: dict[str, Tensor] = {}

    def set_shares(self, shares: Shares) -> None:
        """Move whole nodes between ranks. All ranks call it between steps. Raises PeerLostError."""
        level = self.top_level
        nodes = tuple(range(share.start >> level, -(-share.stop >> level)) for share in shares)
        self.memory.move(self.wire.world, self.wire.shares, nodes)
        self.wire.set_shares(nodes)

    def begin_step(self, scale: Tensor | None) -> None:
        self._scale, self._before_that = scale, self._before
        if scale is not None:
            self._before = {
                name: tensor.clone() for name, tensor in self.compressor.state().items()
            }

    def undo_step(self) -> None:
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
"""A DDP communication hook: (state, bucket) -> future of the mean over ranks."""


class Hooked(Combine):
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
        # A hook returns the mean over ranks, but the total is their sum.
        bucket.flat.mul_(self.exchange.world.world_size)
        is_last = index == self._places[-1]
        view = HookBucket(bucket, self._places.index(index), is_last, self.parameters)
        self.exchange.world.traffic.add_unknown()
        with peers_may_be_lost(self.exchange.world, runs_user_code=True):
            mean = self.hook(self.state, view).wait()
        bucket.flat.copy_(mean)


class HookBucket:
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
        """Return contiguous gradients in any memory format, as DDP does: hooks `view` them."""
        starts = [self._bucket.start(member) for member in self._bucket.members]
        return [
            self._buffer[start : start + view.numel()].view(view.shape)
            for start, view in zip(starts, self._bucket.views, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        return [self._parameters[member] for member in self._bucket.members]


def gradients_of(bucket: Bucket, num_parameters: int) -> Tensor:
    """Return the part of a bucket's vector before the tail, whose members are last."""
    tails = [member for member in bucket.members if member >= num_parameters]
    return bucket.flat[: bucket.start(tails[0])] if tails else bucket.flat


class WeightGather:
    """Gathers updated weights, if each rank updates only a shard of them."""

    def __init__(
        self, world: Group, shards: Shards, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._shards, self._parameters = shards, list(parameters.items())
        self._world_size = world.world_size
        self._collectives = Collectives(world)

    def __call__(self, bucket: Bucket) -> None:
        """Gather one bucket's weights. All ranks call it. Raises PeerLostError."""
        named = [self._parameters[member] for member in bucket.members]
        weights = [weight.detach() for _, weight in named]
        for (name, _), weight, view in zip(named, weights, bucket.views, strict=True):
            local_part = self._shards.own_part(name, view)
            local_part.copy_(self._shards.own_part(name, weight))
        cuts = self._shards.cuts[bucket.members]
        gather = half(partial(sharded_parameter_server.schedule, cuts=cuts), ALL_GATHER)
        make = partial(gather, self._world_size)
        self._collectives.run((ALL_GATHER, cuts), make, bucket.flat)
        torch._foreach_copy_(weights, list(bucket.views))
