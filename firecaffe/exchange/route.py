"""How a step's gradients go from each worker's sums to their total: decided here, for all who ask.

The reducer, `auto`, `bench exchange`, `parallelize`, the planner and a run's record take one value
from one function. Four ways there are:

- `SCHEDULE`: each worker has one sum; the algorithm's schedule, or the backend's own all_reduce.
  Ranks of one host may add in the memory that they share; one of each host then sends.
- `FOLD`: workers keep their nodes of the micro-batch tree apart. It stands in for an algorithm that
  promises the tree's order of additions where it cannot keep it: shares are no subtrees, or may
  become any, or the number of workers does not suit it. (A ring promises none; it stays a
  schedule.) It also brings shards to their owners, if each worker updates one.
- `CODEC`: nodes of one level of the tree, each encoded.
- `HOOK`: a communication hook of DDP's kind.
"""

from dataclasses import dataclass
from functools import partial

from firecaffe.exchange import NATIVE, find_schedule, parse_hierarchical, shared_memory
from firecaffe.exchange.leaves import (
    largest_nodes,
    leaves_of,
    shares_are_subtrees,
    small_first,
)
from firecaffe.exchange.order import adds_in_tree_order, keeps_tree_order
from firecaffe.exchange.schedule import Schedule

SCHEDULE, FOLD, CODEC, HOOK = "schedule", "fold", "codec", "hook"


@dataclass(frozen=True)
class Route:
    """The way, and what follows from it."""

    way: str
    algorithm: str
    """The recipe's algorithm. It sums if the way is SCHEDULE; else it only stands in the record."""
    world_size: int
    is_invariant: bool
    """Whether this many workers end in the same bits as one worker does."""
    ranks_per_host: int = 1
    across: str = ""
    """What goes on between hosts, if the ranks of each add in the memory that they share."""
    codec: str = ""
    level: int = 0
    """The level of the micro-batch tree whose nodes a codec encodes."""
    hook: str = ""
    """What it is called."""
    to_owners: bool = False
    """Whether each rank updates a shard. It is brought the total of that alone, if none encodes."""
    apart: str = ""
    """Why nodes stay apart, if the way is FOLD."""

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one host add in the memory that they share."""
        return bool(self.across)

    @property
    def senders(self) -> int:
        """Ranks that send: all, or one of each host if the others add in memory."""
        return self.world_size // self.ranks_per_host if self.shares_memory else self.world_size

    @property
    def summed_by(self) -> str:
        """What sums vectors: the algorithm, or what stands in for it."""
        return self.algorithm if self.way == SCHEDULE else self.way

    def schedule(self, num_elements: int) -> Schedule:
        """What sums a vector of each rank, if the way is SCHEDULE.

        Raises: ValueError if the algorithm has no schedule.
        """
        if not self.shares_memory:
            return find_schedule(self.algorithm, self.ranks_per_host)(self.world_size, num_elements)
        return shared_memory.schedule(
            self.world_size,
            num_elements,
            outer=find_schedule(self.across),
            ranks_per_host=self.ranks_per_host,
        )

    def order(self, num_leaves: int, share: range) -> list[int]:
        """The micro-batches of a share in the order in which a worker computes them: node by node
        if these stay apart, see `exchange.leaves.small_first`.
        """
        if self.way != FOLD:
            return list(share)
        nodes = small_first(largest_nodes(num_leaves, share), num_leaves)
        return [leaf for node in nodes for leaf in leaves_of(node, num_leaves)]

    @property
    def description(self) -> str:
        """How gradients go, for a run's record."""
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
    """The route of a training, or of vectors.

    Args:
        algorithm: A row of `EXCHANGES`, or a hierarchical one.
        num_leaves: Micro-batches of a step; None if each rank has a vector, for which nothing
            stands in for the algorithm.
        ranks_per_host: The same on all hosts; 1 if it is not.
        shared_memory: Whether ranks of one host may add in memory.
        codec: The compressor, if there is one, which encodes nodes of `level`.
        hook: The name of a communication hook, if there is one.
        any_shares: Whether workers may come to have any shares; else theirs are equal.
        to_owners: Whether each worker updates a shard of the weights, and needs no other total.

    Raises: ValueError if there is no such algorithm among so many ranks.
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
            apart = "shares are no subtrees"
        return route(FOLD, is_invariant=True, apart=apart)
    across = _across_hosts(algorithm, world_size, ranks_per_host) if shared_memory else ""
    return route(SCHEDULE, is_invariant=world_size == 1 or continues, across=across)


def _across_hosts(algorithm: str, world_size: int, ranks_per_host: int) -> str:
    """What goes on between hosts if the ranks of each add in shared memory; nothing if the order of
    additions would be another than the algorithm's own, or hosts have one rank each.
    """
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
