"""The route of a step's gradients from each worker's sums to their total, decided in one place.

- `SCHEDULE`: each worker has one sum; the algorithm's schedule, or the backend's own all_reduce.
- `FOLD`: workers keep their nodes of the micro-batch tree apart. It replaces an algorithm that
  promises tree order but cannot keep it, and brings shards to owners that update one each.
- `CODEC`: nodes of one level of the tree, each encoded.
- `HOOK`: a communication hook, like DDP's.

Whether an exchange adds in the order of the fixed binary tree is a closed-form rule of its
algorithm, which the tests prove at world sizes up to 33 and more.

`choose` finds the exchange that is fastest on a measured link. A choice by time may differ from
start to start, so its candidates all add in tree order: they give the same bits.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from firecaffe.exchange import (
    ALGORITHMS,
    NATIVE,
    find_schedule,
    parse_hierarchical,
    shared_memory,
    useful_lanes,
)
from firecaffe.exchange.leaves import largest_nodes, leaves_of, shares_are_subtrees, small_first
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT, Schedule


def adds_in_tree_order(algorithm: str, world_size: int, ranks_per_node: int = 1) -> bool:
    """Whether the result has the bits of the fixed tree over ranks. Raises: ValueError."""
    if algorithm == NATIVE:
        return world_size <= 2  # a library promises no order, but two numbers have only one sum
    return find_schedule(algorithm, ranks_per_node)(world_size, 4 * world_size).in_tree_order


def keeps_tree_order(algorithm: str) -> bool:
    """Whether the algorithm is made for tree order; some keep it only at suitable world sizes."""
    # Four are the fewest ranks, or nodes, at which orders differ and every algorithm works.
    if algorithm.startswith("hierarchical"):
        return adds_in_tree_order(algorithm, 16, ranks_per_node=4)
    return adds_in_tree_order(algorithm, 4)


SCHEDULE, FOLD, CODEC, HOOK = "schedule", "fold", "codec", "hook"


@dataclass(frozen=True)
class Route:
    way: str
    algorithm: str
    """The recipe's algorithm, which sums if the way is SCHEDULE; else it is only recorded."""
    world_size: int
    is_invariant: bool
    """Whether this many workers end in the same bits as one worker does."""
    ranks_per_host: int = 1
    across: str = ""
    """The exchange between hosts, if the ranks of each host add in shared memory; else empty."""
    codec: str = ""
    level: int = 0
    """The level of the micro-batch tree whose nodes a codec encodes."""
    hook: str = ""
    to_owners: bool = False
    """Whether each rank updates a shard. Without a codec, it gets only that shard's total."""
    apart: str = ""
    """The reason why nodes stay apart, if the way is FOLD."""

    @property
    def is_mean(self) -> bool:
        """Whether the total, divided, is the mean gradient: nothing is encoded or replaced."""
        return self.way in (SCHEDULE, FOLD)

    @property
    def shares_memory(self) -> bool:
        return bool(self.across)

    @property
    def senders(self) -> int:
        """The number of ranks that send: all, or one of each host with shared memory."""
        return self.world_size // self.ranks_per_host if self.shares_memory else self.world_size

    @property
    def lanes(self) -> int:
        return 1 if self.shares_memory else useful_lanes(self.algorithm)

    @property
    def summed_by(self) -> str:
        """The name of the algorithm that sums, or of the way that replaces it."""
        return self.algorithm if self.way == SCHEDULE else self.way

    def schedule(self, num_elements: int) -> Schedule:
        """Return the schedule that sums a vector, if the way is SCHEDULE. Raises: ValueError."""
        if not self.shares_memory:
            return find_schedule(self.algorithm, self.ranks_per_host)(self.world_size, num_elements)
        return shared_memory.schedule(
            self.world_size,
            num_elements,
            outer=find_schedule(self.across),
            ranks_per_host=self.ranks_per_host,
        )

    def order(self, num_leaves: int, share: range) -> list[int]:
        """Return the order in which a worker computes its share: by node if nodes stay apart."""
        if self.way != FOLD:
            return list(share)
        nodes = small_first(largest_nodes(num_leaves, share), num_leaves)
        return [leaf for node in nodes for leaf in leaves_of(node, num_leaves)]

    @property
    def description(self) -> str:
        if self.way == HOOK:
            return f"communication hook {self.hook}"
        if self.way == CODEC:
            return f"{self.codec} at level {self.level} of the micro-batch tree"
        if self.to_owners:
            return f"{self.way} to the owners of shards"
        if not self.shares_memory:
            return self.summed_by
        one_host = self.senders == 1
        return "shared memory" if one_host else f"shared memory, {self.across} between hosts"


def find_route(
    algorithm: str,
    num_leaves: int | None,
    world_size: int,
    ranks_per_host: int = 1,
    *,
    shared_memory: bool = False,
    codec: str = "",
    level: int = 0,
    hook: str = "",
    any_shares: bool = False,
    to_owners: bool = False,
) -> Route:
    """Return the route of a training, or of vectors. Raises: ValueError.

    num_leaves: None if each rank has a vector, for which nothing replaces the algorithm.
    ranks_per_host: 1 if hosts differ. shared_memory: whether ranks of one host may add in memory.
    level: of the nodes that the codec encodes. any_shares: whether workers may get unequal shares.
    to_owners: whether each worker updates a shard of the weights, and needs no other total.
    """
    route = partial(
        Route,
        algorithm=algorithm,
        world_size=world_size,
        ranks_per_host=ranks_per_host,
    )
    if hook:
        return route(HOOK, is_invariant=world_size == 1, hook=hook)
    if codec:
        shares_out = to_owners and world_size > 1
        return route(CODEC, is_invariant=True, codec=codec, level=level, to_owners=shares_out)
    if to_owners and world_size > 1:
        return route(FOLD, is_invariant=True, to_owners=True)
    brings_subtrees = num_leaves is None or (
        not any_shares and shares_are_subtrees(num_leaves, world_size)
    )
    continues = brings_subtrees and adds_in_tree_order(algorithm, world_size, ranks_per_host)
    has_stand_in = num_leaves is not None and keeps_tree_order(algorithm)
    if world_size > 1 and not continues and has_stand_in:
        apart = f"{algorithm} does not add in the tree's order at {world_size} workers"
        if any_shares:
            apart = "shares may become any"
        elif not brings_subtrees:
            apart = "workers' shares are no branches of the tree"
        return route(FOLD, is_invariant=True, apart=apart)
    across = _across_hosts(algorithm, world_size, ranks_per_host) if shared_memory else ""
    return route(SCHEDULE, is_invariant=world_size == 1 or continues, across=across)


def _across_hosts(algorithm: str, world_size: int, ranks_per_host: int) -> str:
    # Empty if the order of additions would differ, or hosts have one rank each.
    if ranks_per_host < 2 or world_size % ranks_per_host:
        return ""
    nested = parse_hierarchical(algorithm)
    if nested is not None:
        return nested[1]
    hosts = world_size // ranks_per_host
    if not adds_in_tree_order(algorithm, world_size) or algorithm == NATIVE:
        return ""
    is_subtree = hosts == 1 or ranks_per_host & (ranks_per_host - 1) == 0
    return algorithm if is_subtree and adds_in_tree_order(algorithm, hosts) else ""


@dataclass(frozen=True)
class Choice:
    """An exchange, and the predicted times."""

    algorithm: str
    predicted_s: float
    """The predicted seconds for one vector of each size, one after the other."""
    by_algorithm: dict[str, float]
    """The predicted seconds of all candidates, in the order of the table."""


def predict_s(
    schedule: Schedule, latency_s: float, bandwidth_bytes_per_s: float, bytes_per_element: int
) -> float:
    """Return the seconds that a schedule's rounds take one after the other, without additions.

    Source: the model of Thakur, Rabenseifner and Gropp 2005: latency for each message through the
    busiest port of a round, and the bytes through it over the bandwidth.
    """
    serial_bytes = schedule.serial_elements() * bytes_per_element
    return schedule.serial_messages() * latency_s + serial_bytes / bandwidth_bytes_per_s


def choose(
    world_size: int,
    sizes_bytes: Sequence[int],
    latency_s: float,
    bandwidth_bytes_per_s: float,
    senders: int | None = None,
) -> Choice:
    """Return the exchange with the least predicted time over vectors of these sizes.

    In a tie, the earlier one in the table wins. On one rank, which sends nothing, it is tree.
    senders: the number of ranks that send, if one does for each host; tree order must hold among
    them, too.
    """
    senders = world_size if senders is None else senders
    if senders == 1:
        return Choice("tree", 0.0, {"tree": 0.0})
    counts = Counter(-(-size // BYTES_PER_ELEMENT) for size in sizes_bytes)
    by_algorithm = {
        name: sum(
            count
            * predict_s(
                schedule(senders, num_elements),
                latency_s,
                bandwidth_bytes_per_s,
                BYTES_PER_ELEMENT,
            )
            for num_elements, count in counts.items()
        )
        for name, schedule in ALGORITHMS.items()
        if adds_in_tree_order(name, world_size) and adds_in_tree_order(name, senders)
    }
    algorithm = min(by_algorithm, key=by_algorithm.__getitem__)
    return Choice(algorithm, by_algorithm[algorithm], by_algorithm)
