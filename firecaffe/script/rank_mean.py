"""Turns the buckets of DistributedDataParallel into their mean over all ranks.

Ranks of one host add in shared memory: DDP's buckets move there after the first step, with all
their views, and are summed in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from firecaffe.cluster.world import peers_may_be_lost
from firecaffe.errors import RecipeError
from firecaffe.gradients.buckets import layout_of, make_bucket
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW, Compressor
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.fold_nodes import NodeWire


@dataclass(frozen=True)
class Bucket:
    index: int
    is_last: bool
    buffer: Tensor
    """The gradients of `parameters` in sequence, as they lie in memory."""
    parameters: Sequence[Tensor]
    is_active: bool = True
    """Whether this rank still has inputs (`torch.distributed.algorithms.Join`)."""
    counts_ranks: bool = False
    """Whether the mean is over the ranks that still have inputs, not over all."""


class RankMean:
    def __init__(self, exchange: Exchange, compressor: str) -> None:
        self._world = exchange.world
        self._exchange = exchange
        self._compressor = compressor
        self._wire = NodeWire(self._world, self._world.world_size)
        self._is_first_step = True
        self._places: dict[int, Tensor] = {}
        self._names: dict[Tensor, str] = {}
        self._coded: dict[int, CodedBucket] = {}
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, bucket: Bucket) -> Tensor:
        """Return the mean, in the buffer or in shared memory, until the bucket comes again."""
        # Vectors are divided before the sum, as in DDP, so that nothing overflows except the mean.
        count = self._count(bucket)
        buffer = bucket.buffer
        # DDP cuts its buckets anew after the first step, so buffers for them would not last.
        is_first_step = self._is_first_step
        if bucket.is_last:
            self._is_first_step = False
        if buffer.is_sparse:
            buffer.div_(count)
            with peers_may_be_lost(self._world):
                dist.all_reduce(buffer, group=self._world.exchange_group)
        elif is_first_step or not (self._is_coded or self._exchange.route.shares_memory):
            self._exchange.all_reduce(buffer, divide_by=count)
        elif self._is_coded:
            buffer.div_(count)
            self._reduce_coded(bucket)
        else:
            place = self._place_of(bucket)
            if place.data_ptr() != buffer.data_ptr():
                place.copy_(buffer)
            self._exchange.all_reduce(place, divide_by=count)
            return place
        return buffer

    @property
    def _is_coded(self) -> bool:
        return self._compressor != NO_COMPRESSOR

    def close(self) -> None:
        self._places.clear()
        self._exchange.close()

    def _count(self, bucket: Bucket) -> int:
        if not bucket.counts_ranks:
            return self._world.world_size
        active = torch.full((1,), float(bucket.is_active), device=bucket.buffer.device)
        self._exchange.all_reduce(active)
        return max(1, round(active.item()))

    def _place_of(self, bucket: Bucket) -> Tensor:
        """Return the shared memory of a bucket: usually its own buffer, which moves there."""
        # The decision is the same on all ranks. A rank without inputs brings another buffer each
        # time (`Join`), and DDP may cut buckets of the same sizes anew: these are copied.
        buffer = bucket.buffer
        place = self._places.get(bucket.index)
        if place is None or place.numel() != buffer.numel() or place.dtype != buffer.dtype:
            if place is not None:
                self._exchange.forget(place)
            place = self._places[bucket.index] = self._exchange.place_for(buffer)
        return place

    def _reduce_coded(self, bucket: Bucket) -> None:
        check_encodable(self._compressor, bucket.buffer.dtype)
        coded = self._coded.get(bucket.index)
        if coded is None or not coded.holds(bucket.parameters):
            coded = self._lay_out(bucket, is_stale=coded is not None)
        parts = bucket.buffer.split_with_sizes([p.numel() for p in bucket.parameters])
        torch._foreach_copy_(coded.parts_of(coded.vector), parts)
        nodes = [(self._world.rank, coded.vector)]
        torch._foreach_copy_(parts, coded.parts_of(coded.compressor.reduce(0, nodes, self._wire)))

    def _lay_out(self, bucket: Bucket, is_stale: bool) -> "CodedBucket":
        """Make the aligned vector of a bucket. A compressor's memory follows the parameters."""
        if is_stale:
            for coded in self._coded.values():
                self._memory |= coded.compressor.state()
            self._coded.clear()
        for parameter in bucket.parameters:
            # Named in the order of DDP, which is the same on all ranks.
            self._names.setdefault(parameter, f"parameter{len(self._names)}")
        names = [self._names[parameter] for parameter in bucket.parameters]
        aligned = make_bucket(
            bucket.parameters,
            range(len(names)),
            multiple=self._world.world_size * ROW,
            allocate=lambda size, dtype, device: torch.zeros(size, dtype=dtype, device=device),
            alignment=ROW,
        )
        layout = layout_of(aligned, names)
        compressor = make_compressor(self._compressor, [layout])
        own = [key for key in self._memory if key.partition(".")[2] in names]
        memory = {key: self._memory.pop(key) for key in own}
        compressor.load_state(memory, [self._world.rank])
        coded = CodedBucket(bucket.parameters, aligned.flat, layout.spans, compressor)
        self._coded[bucket.index] = coded
        return coded


@dataclass(frozen=True)
class CodedBucket:
    """A DDP bucket for a compressor, with every parameter at a multiple of `ROW`."""

    parameters: Sequence[Tensor]
    vector: Tensor
    spans: tuple[tuple[int, int], ...]
    compressor: Compressor

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        return len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        )

    def parts_of(self, vector: Tensor) -> list[Tensor]:
        return [vector[start:stop] for start, stop in self.spans]


def check_encodable(compressor: str, dtype: torch.dtype) -> None:
    if compressor != NO_COMPRESSOR and dtype != torch.float32:
        raise RecipeError(f"compressor {compressor} encodes float32 gradients; some are {dtype}")
