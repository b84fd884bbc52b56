"""The fixed binary tree over micro-batches, and how it is cut among workers.

The V micro-batches of a step are leaves. Node (k, j) is the sum of leaves [j 2^k, (j + 1) 2^k),
clipped at V. A worker adds its consecutive leaves with a binary counter, which leaves the largest
nodes inside its share: one for an aligned power of two, at most 2 lg V otherwise. The same counter
over the nodes of all workers, in order, does the same additions however leaves were shared out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

Shares = tuple[range, ...]
"""The consecutive leaves of each worker, by rank; together they are all leaves."""


@dataclass(frozen=True, slots=True)
class Node:
    """The sum of leaves [index · 2^level, (index + 1) · 2^level), clipped at the last leaf."""

    level: int
    index: int


def leaf_share(num_leaves: int, world_size: int, rank: int, level: int = 0) -> range:
    """Return one worker's consecutive leaves; shares differ by at most one node of `level`."""
    nodes = num_nodes(num_leaves, level)
    first, last = nodes * rank // world_size, nodes * (rank + 1) // world_size
    return range(min(first << level, num_leaves), min(last << level, num_leaves))


def equal_shares(num_leaves: int, world_size: int, level: int = 0) -> Shares:
    return tuple(leaf_share(num_leaves, world_size, rank, level) for rank in range(world_size))


def num_nodes(num_leaves: int, level: int) -> int:
    return -(-num_leaves // (1 << level))


class TreeSum(Generic[T]):
    """A binary counter of pending nodes, up to `top_level`, by default the root.

    `add(left, right)` is commutative, and may add in place into `left`. Nodes may come in any
    order.
    """

    def __init__(
        self, num_leaves: int, add: Callable[[T, T], T], top_level: int | None = None
    ) -> None:
        self.num_leaves = num_leaves
        self.top_level = top_level
        self.pending: list[tuple[Node, T]] = []
        self._add = add

    def push(self, node: Node, value: T) -> None:
        merged, node = self.take_completed(node)
        for sibling in merged:
            value = self._add(sibling, value)
        place = len(self.pending)
        while place and _first(self.pending[place - 1][0]) > _first(node):
            place -= 1
        self.pending.insert(place, (node, value))

    def take_completed(self, node: Node) -> tuple[list[T], Node]:
        """Remove and return the values that `node` completes, in order, and their sum's node."""
        # The caller adds and pushes them: so the last micro-batch is summed bucket by bucket during
        # backward.
        merged: list[T] = []
        while node.level != self.top_level:
            if node.index == 0 and 1 << node.level >= self.num_leaves:
                return merged, node  # the root
            sibling = Node(node.level, node.index ^ 1)
            if _first(sibling) < self.num_leaves:  # the last node may have no sibling
                place = self._place(sibling)
                if place is None:
                    return merged, node  # the sibling will still come, or is another worker's
                merged.append(self.pending.pop(place)[1])
            node = Node(node.level + 1, node.index // 2)
        return merged, node

    def _place(self, node: Node) -> int | None:
        for place in range(len(self.pending) - 1, -1, -1):
            if self.pending[place][0] == node:
                return place
        return None

    def total(self) -> T:
        """Return the value of the root. Raises: ValueError if leaves are missing."""
        if len(self.pending) != 1 or 1 << self.pending[0][0].level < self.num_leaves:
            raise ValueError(f"not all {self.num_leaves} leaves were added: {self.pending}")
        return self.pending[0][1]


def _first(node: Node) -> int:
    return node.index << node.level


def tree_sum(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Add neighbors, then neighbors of the sums, and so on: the order of additions everywhere."""
    level = list(values)
    while len(level) > 1:
        pairs = [add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def sum_of_nodes(
    nodes: Sequence[Node], values: Sequence[T], num_leaves: int, add: Callable[[T, T], T]
) -> T:
    """Return the root of the tree's ordered nodes. Raises: ValueError if leaves are missing."""
    counter = TreeSum(num_leaves, add)
    for node, value in zip(nodes, values, strict=True):
        counter.push(node, value)
    return counter.total()


def largest_nodes(num_leaves: int, share: range, top_level: int | None = None) -> list[Node]:
    """Return the nodes that a worker is left with after adding its leaves."""
    counter: TreeSum[None] = TreeSum(num_leaves, lambda left, right: None, top_level)
    for leaf in share:
        counter.push(Node(0, leaf), None)
    return [node for node, _ in counter.pending]


def leaves_of(node: Node, num_leaves: int) -> range:
    return range(
        min(node.index << node.level, num_leaves), min((node.index + 1) << node.level, num_leaves)
    )


def small_first(nodes: Sequence[Node], num_leaves: int) -> list[Node]:
    """Return a worker's nodes in the order of their computation, the largest last."""
    # The others are then complete long before the last, and can be sent meanwhile. No bit changes.
    return sorted(nodes, key=lambda node: len(leaves_of(node, num_leaves)))


def shares_are_subtrees(num_leaves: int, world_size: int) -> bool:
    """Whether shares are equal and one node each, so that a tree over ranks continues the tree."""
    share, rest = divmod(num_leaves, world_size)
    return world_size == 1 or (rest == 0 and share & (share - 1) == 0)
