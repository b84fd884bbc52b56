"""Double tree: two binary trees, each for half of the vector, so that no port is ever idle.

The inner ranks of the first tree are odd; the second is the first with every rank moved on by one.
So no rank is inner in both. Rounds alternate: in one, all sums go up, each segment one level ahead
of the next; in the other, all totals come down. Each tree has s / 2 of s segments. The rounds bring
2 s + 4 floor(lg p) - 4 segments through the busiest port, 2 fewer if p is a power of two: 2 n β as
s grows, at every p from 3 on. There are s + 2 floor(lg p) - 2 rounds, where a ring has 2 (p - 1).
Sums are not in tree order: a rank and its children are added in one `tree_sum`.
Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and
scan. Parallel Computing 35, 2009. The paper colors edges; here a port has two messages in a round.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TypeAlias

from firecaffe.exchange.pipelined_tree import SEGMENT_ELEMENTS, num_segments, overlay
from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer, shards

Levels: TypeAlias = list[list[tuple[int, int]]]
"""The (child, parent) pairs of a tree, by depth of the child from 1 on."""


def schedule(
    world_size: int, num_elements: int, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    per_tree = num_segments(num_elements, 2 * segment_elements)
    depth = world_size.bit_length() - 1
    return Schedule(
        "double_tree",
        world_size,
        num_elements,
        partial(_rounds, world_size, num_elements, per_tree),
        num_rounds=2 * (2 * depth - 2 + per_tree) if depth else 0,
        num_messages=2 * (world_size - 1) * 2 * per_tree,
        sent_elements=2 * (world_size - 1) * num_elements,
        in_tree_order=world_size <= 3,
    )


def _rounds(p: int, n: int, per_tree: int, rank: int) -> Iterator[OwnRound]:
    segments = shards(n, 2 * per_tree)
    halves = segments[:per_tree], segments[per_tree:]
    first, second = (
        dict(overlay(_there_and_back(p, shift, rank), half, stride=2))
        for shift, half in enumerate(halves)
    )
    for number in sorted({*first, *second}):
        yield number, [*first.get(number, ()), *second.get(number, ())]


def two_trees(world_size: int) -> tuple[Levels, Levels]:
    """Return two trees of floor(lg p) levels below the root, with no inner rank in common."""
    first = _tree(world_size)
    second = [[((a + 1) % world_size, (b + 1) % world_size) for a, b in level] for level in first]
    return first, second


def _tree(world_size: int) -> Levels:
    # Ranks are in order from left to right; those of even number are the leaves.
    levels: Levels = []
    below: list[tuple[int, int, int | None]] = [(0, world_size, None)]
    while below:
        subtrees, below = below, []
        levels.append([])
        for start, stop, parent in subtrees:
            root = _root(start, stop)
            if parent is not None:
                levels[-1].append((root, parent))
            below += [(a, b, root) for a, b in ((start, root), (root + 1, stop)) if a < b]
    return levels[1:]


def _root(start: int, stop: int) -> int:
    # An odd number of ranks on the left, so that the next subtree starts at an even rank.
    return start + ((stop - start - 1) // 2 | 1) if stop - start > 1 else start


def _edges(world_size: int, rank: int) -> Iterator[tuple[int, int, int]]:
    # (depth, child, parent) of the edges of `_tree` at the rank, from the root down.
    start, stop, depth, parent = 0, world_size, 0, -1
    while (root := _root(start, stop)) != rank:
        start, stop = (start, root) if rank < root else (root + 1, stop)
        depth, parent = depth + 1, root
    if depth:
        yield depth, rank, parent
    for a, b in ((start, rank), (rank + 1, stop)):
        if a < b:
            yield depth + 1, _root(a, b), rank


def _there_and_back(p: int, shift: int, rank: int) -> list[OwnRound]:
    # Sums go up in every second round, the total comes down in the others.
    last_up = 2 * (p.bit_length() - 2)
    by_round: dict[int, list[Transfer]] = defaultdict(list)
    for depth, child, parent in _edges(p, (rank - shift) % p):
        child, parent = (child + shift) % p, (parent + shift) % p
        by_round[last_up - 2 * (depth - 1)].append(Transfer(child, parent, 0, 0, reduce=True))
        by_round[last_up + 2 * depth - 1].append(Transfer(parent, child, 0, 0, reduce=False))
    return sorted(by_round.items())
