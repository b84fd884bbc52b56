"""Who updates the weights, as it is priced: the rows of `exchange.update_at`."""

from collections.abc import Sequence
from typing import Protocol

from firecaffe.exchange.schedule import ALL_GATHER, REDUCE_SCATTER
from firecaffe.plan.network import Network
from firecaffe.plan.price import Prices
from firecaffe.plan.shards import shards_of, shards_s
from firecaffe.plan.workload import Workload


class PlannedUpdate(Protocol):
    """What an update costs on several workers."""

    to_owners: bool
    """Whether a worker needs the total of its own shard alone."""
    said: str
    """For people, behind the size of the gradients."""
    share_before: float
    """The share of a sum's time that comes before the update. A sum to all is one to owners and the
    way back from them, which take equally long.
    """

    def sums_s(self, work: Workload, prices: Prices, sizes: Sequence[int]) -> list[float]:
        """Seconds until each bucket's total, of so many elements, is where it is needed. prices: of
        the exchange among all workers.
        """

    def back_s(self, work: Workload, network: Network) -> float:
        """Seconds until all workers have all weights again, once they are updated."""

    def updated_bytes(self, work: Workload, world_size: int) -> int:
        """The weights that a worker updates, at most."""

    def arriving_bytes(self, work: Workload, world_size: int, of_buckets: float) -> float:
        """What arrives at once, at most. of_buckets: if whole buckets do."""


class ByAll:
    """Every worker updates all weights."""

    to_owners, said, share_before = False, "", 1.0

    def sums_s(self, work: Workload, prices: Prices, sizes: Sequence[int]) -> list[float]:
        return prices.seconds(sizes)

    def back_s(self, work: Workload, network: Network) -> float:
        return 0.0

    def updated_bytes(self, work: Workload, world_size: int) -> int:
        return work.parameter_bytes

    def arriving_bytes(self, work: Workload, world_size: int, of_buckets: float) -> float:
        return of_buckets


class ByOwners:
    """Each worker updates a shard, and sends it to the others."""

    to_owners, said, share_before = True, ", updated in shards", 0.5

    def sums_s(self, work: Workload, prices: Prices, sizes: Sequence[int]) -> list[float]:
        return shards_s(work, prices.network, REDUCE_SCATTER)

    def back_s(self, work: Workload, network: Network) -> float:
        return sum(shards_s(work, network, ALL_GATHER))

    def updated_bytes(self, work: Workload, world_size: int) -> int:
        return shards_of(work, world_size).held_bytes

    def arriving_bytes(self, work: Workload, world_size: int, of_buckets: float) -> float:
        return float(shards_of(work, world_size).arriving_bytes)


ALL = "all"
UPDATES: dict[str, PlannedUpdate] = {ALL: ByAll(), "shards": ByOwners()}


def update_of(work: Workload, world_size: int) -> PlannedUpdate:
    """The update of so many workers: one alone updates all weights."""
    return UPDATES[work.update_at if world_size > 1 else ALL]
