"""Prices the update by who makes it: all workers or owners of shards (`exchange.update_at`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod

from firecaffe.exchange.route import FOLD
from firecaffe.exchange.schedule import ALL_GATHER, BYTES_PER_ELEMENT, REDUCE_SCATTER
from firecaffe.gradients.buckets import cut
from firecaffe.gradients.shards import cut_buckets, held_elements, spans_of
from firecaffe.planner.price import Prices
from firecaffe.planner.simulate import Network
from firecaffe.planner.workload import Workload

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedShards:
    """All workers' shards, cut as in training; parameters are assumed to lie row by row."""

    elements: tuple[tuple[int, ...], ...]
    """The elements of parameters that each worker has in a bucket, by bucket."""

    @cached_property
    def held_bytes(self) -> int:
        """The weight bytes of the worker that holds most."""
        return BYTES_PER_ELEMENT * max(map(sum, zip(*self.elements, strict=True)), default=0)

    @cached_property
    def arriving_bytes(self) -> int:
        """The most bytes that arrive at once for a shard of a bucket, from all other workers."""
        others = len(self.elements[0]) - 1 if self.elements else 0
        return BYTES_PER_ELEMENT * others * max(map(max, self.elements), default=0)

    @property
    def unevenness(self) -> list[float]:
        """The largest shard of each bucket over a shard of equal size."""
        return [max(1.0, max(sizes) * len(sizes) / max(1, sum(sizes))) for sizes in self.elements]


def shards_of(workload: Workload, world_size: int) -> PlannedShards:
    shapes = chain.from_iterable(layer.shapes[::-1] for layer in reversed(workload.layers))
    return _cut(tuple(shapes), workload.bucket_bytes, world_size, workload.has_whole_shards)


def shards_s(workload: Workload, network: Network, kind: str) -> list[float]:
    """Seconds to send each bucket to its shards' owners, or back, by its largest shard."""
    shards = shards_of(workload, network.world_size)
    prices = Prices(FOLD, network, num_leaves=workload.num_micro_batches, kind=kind)
    taken_s = prices.seconds([sum(sizes) for sizes in shards.elements])
    return [equal_s * more for equal_s, more in zip(taken_s, shards.unevenness, strict=True)]


@lru_cache
def _cut(shapes: Sequence[Shape], bucket_bytes: int, world_size: int, whole: bool) -> PlannedShards:
    sizes = [BYTES_PER_ELEMENT * prod(shape) for shape in shapes]
    rows = [_rows(shape, whole) for shape in shapes]
    buckets = [spans_of(rows[start:stop]) for start, stop in cut(sizes, bucket_bytes)]
    cuts = cut_buckets([spans for spans, _ in buckets], [end for _, end in buckets], world_size)
    return PlannedShards(
        tuple(
            held_elements(spans, bucket_cuts)
            for (spans, _), bucket_cuts in zip(buckets, cuts, strict=True)
        )
    )


def _rows(shape: Shape, whole: bool) -> tuple[int, int]:
    return (1, prod(shape)) if whole or not prod(shape) else (shape[0], prod(shape[1:]))


class PlannedUpdate:
    """Every worker updates all weights."""

    to_owners = False
    """Whether a worker only needs the total of its shard."""
    said = ""
    """The text that a plan prints after the size of the gradients."""
    share_before = 1.0
    """The share of a sum's time before the update: half if the all-gather comes after it."""

    def sums_s(self, work: Workload, prices: Prices, sizes: Sequence[int]) -> list[float]:
        """Seconds until each bucket's total is where it is needed. prices: among all workers."""
        return prices.seconds(sizes)

    def back_s(self, work: Workload, network: Network) -> float:
        """Seconds to agree on the update, and after it to send all workers all weights."""
        return 0.0

    def updated_bytes(self, work: Workload, world_size: int) -> int:
        """The most weight bytes that a worker updates."""
        return work.parameter_bytes

    def arriving_bytes(self, work: Workload, world_size: int, of_buckets: float) -> float:
        """The most bytes that arrive at once. of_buckets: the value if whole buckets arrive."""
        return of_buckets


class ByOwners(PlannedUpdate):
    """Each worker updates a shard, and sends it to the others."""

    to_owners, said, share_before = True, ", updated in shards", 0.5

    def sums_s(self, work: Workload, prices: Prices, sizes: Sequence[int]) -> list[float]:
        return shards_s(work, prices.network, REDUCE_SCATTER)

    def back_s(self, work: Workload, network: Network) -> float:
        return network.agreement_s(network.world_size) + sum(shards_s(work, network, ALL_GATHER))

    def updated_bytes(self, work: Workload, world_size: int) -> int:
        return shards_of(work, world_size).held_bytes

    def arriving_bytes(self, work: Workload, world_size: int, of_buckets: float) -> float:
        return float(shards_of(work, world_size).arriving_bytes)


ALL = "all"
UPDATES: dict[str, PlannedUpdate] = {ALL: PlannedUpdate(), "shards": ByOwners()}


def update_of(work: Workload, world_size: int) -> PlannedUpdate:
    return UPDATES[work.update_at if world_size > 1 else ALL]
