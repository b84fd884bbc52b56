"""Double tree: two binary trees, each for half of the vector, so that no port is ever idle.

The inner ranks of the first tree are odd; the second is the first with every rank moved on by
one. So nobody is an inner rank of both, and a rank that hears from two children in one tree has
none in the other. Rounds alternate. In one, all sums go up, each segment one level ahead of the
next: a rank hears from at most two children and speaks to at most two parents. In the other, all
totals come down: at most two parents, at most two children. In the middle a round has 2 (p - 1)
messages, where p ports with room for two each way could carry 2 p.

Of s segments each tree has s / 2, and floor(lg p) levels below its root. The rounds one after the
other bring 2 s + 4 floor(lg p) - 4 segments through the busiest port, 2 fewer where p is a power
of two: 2 n β as s grows, at every p from 3 on; at p = 2 it is n β. The least for any all-reduce is
2 (p - 1) / p · n β. In return there are s + 2 floor(lg p) - 2 rounds, where a ring has 2 (p - 1).
Sums are not in tree order: a rank and its children are added in one `fold`.

The paper colors the edges so that a port has one message a step; here a round has two, which
needs no coloring, and keeps the two messages apart that neighbors may have for each other.

Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and
scan. Parallel Computing 35, 2009.
"""

from collections.abc import Sequence
from typing import TypeAlias

from firecaffe.exchange.pipeline import SEGMENT_ELEMENTS, num_segments, overlay
from firecaffe.exchange.schedule import Schedule, Transfer, make_schedule, shards

Levels: TypeAlias = list[list[tuple[int, int]]]
"""The (child, parent) pairs of a tree, by depth of the child from 1 on."""


def schedule(
    world_size: int, num_elements: int, *, segment_elements: int = SEGMENT_ELEMENTS
) -> Schedule:
    first, second = two_trees(world_size)
    per_tree = num_segments(num_elements, 2 * segment_elements)
    segments = shards(num_elements, 2 * per_tree)
    of_first = overlay((_there_and_back(first, *s) for s in segments[:per_tree]), stride=2)
    of_second = overlay((_there_and_back(second, *s) for s in segments[per_tree:]), stride=2)
    rounds = [a + b for a, b in zip(of_first, of_second, strict=True)]
    return make_schedule("double_tree", world_size, num_elements, rounds)


def two_trees(world_size: int) -> tuple[Levels, Levels]:
    """Two binary trees of floor(lg p) levels below the root, without an inner rank in common."""
    first = _tree(world_size)
    second = [[((a + 1) % world_size, (b + 1) % world_size) for a, b in level] for level in first]
    return first, second


def _tree(world_size: int) -> Levels:
    """Ranks from left to right, those of even number the leaves."""
    levels: Levels = []
    below: list[tuple[int, int, int | None]] = [(0, world_size, None)]
    while below:
        subtrees, below = below, []
        levels.append([])
        for start, stop, parent in subtrees:
            # An odd number of ranks on the left, so that the next subtree starts at an even rank.
            root = start + ((stop - start - 1) // 2 | 1) if stop - start > 1 else start
            if parent is not None:
                levels[-1].append((root, parent))
            below += [(a, b, root) for a, b in ((start, root), (root + 1, stop)) if a < b]
    return levels[1:]


def _there_and_back(levels: Levels, start: int, stop: int) -> list[list[Transfer]]:
    """One segment's rounds: sums go up in every second one, the total comes down in the others."""
    up = [[Transfer(a, b, start, stop, reduce=True) for a, b in level] for level in levels]
    down = [[Transfer(b, a, start, stop, reduce=False) for a, b in level] for level in levels]
    return [*_every_second(up[::-1]), *_every_second(down)]


def _every_second(rounds: Sequence[list[Transfer]]) -> list[list[Transfer]]:
    spaced = [spaced for round_ in rounds for spaced in (round_, [])]
    return spaced[:-1]
