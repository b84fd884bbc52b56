"""What a worker holds and sends if each updates a shard of the weights (`exchange.update_at`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod

from firecaffe.exchange.choose import BYTES_PER_ELEMENT
from firecaffe.exchange.route import FOLD
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.shards import cut_buckets, held_elements, spans_of
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices
from firecaffe.plan.workload import Workload

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedShards:
    """The shards of all workers, cut as a training cuts them. A parameter of any memory layout is
    taken for one whose rows lie one after the other.
    """

    elements: tuple[tuple[int, ...], ...]
    """The elements of parameters that each worker has in a bucket, by bucket."""

    @cached_property
    def held_bytes(self) -> int:
        """The weights of the worker that has most of them."""
        return BYTES_PER_ELEMENT * max(map(sum, zip(*self.elements, strict=True)), default=0)

    @cached_property
    def arriving_bytes(self) -> int:
        """What arrives at once, at most, for a shard of a bucket: that of all other workers."""
        others = len(self.elements[0]) - 1 if self.elements else 0
        return BYTES_PER_ELEMENT * others * max(map(max, self.elements), default=0)

    @property
    def unevenness(self) -> list[float]:
        """The largest shard of each bucket over an equal one."""
        return [max(1.0, max(own) * len(own) / max(1, sum(own))) for own in self.elements]


def shards_of(workload: Workload, world_size: int) -> PlannedShards:
    """Cuts the buckets of a workload."""
    shapes = chain.from_iterable(layer.shapes[::-1] for layer in reversed(workload.layers))
    return _cut(tuple(shapes), workload.bucket_bytes, world_size, workload.has_whole_shards)


def shards_s(workload: Workload, network: Network, kind: str) -> list[float]:
    """Seconds of each bucket on its way to the owners of its shards, if `kind` is REDUCE_SCATTER,
    or from them, if it is ALL_GATHER. What is uneven takes as long as its largest shard.
    """
    shards = shards_of(workload, network.world_size)
    prices = Prices(FOLD, network, num_leaves=workload.num_micro_batches, kind=kind)
    taken_s = prices.seconds([sum(own) for own in shards.elements])
    return [each * more for each, more in zip(taken_s, shards.unevenness, strict=True)]


@lru_cache
def _cut(shapes: Sequence[Shape], bucket_bytes: int, world_size: int, whole: bool) -> PlannedShards:
    sizes = [BYTES_PER_ELEMENT * prod(shape) for shape in shapes]
    rows = [_rows(shape, whole) for shape in shapes]
    buckets = [spans_of(rows[start:stop]) for start, stop in cut(sizes, bucket_bytes)]
    cuts = cut_buckets([spans for spans, _ in buckets], [end for _, end in buckets], world_size)
    return PlannedShards(
        tuple(held_elements(spans, own) for (spans, _), own in zip(buckets, cuts, strict=True))
    )


def _rows(shape: Shape, whole: bool) -> tuple[int, int]:
    return (1, prod(shape)) if whole or not prod(shape) else (shape[0], prod(shape[1:]))
