"""Binomial reduction tree, the exchange of FireCaffe: sums go up the tree, the total comes down.

In round k of the way up, rank j + 2^k sends its partial sum to rank j, for every j that is a
multiple of 2^(k + 1). After ceil(lg p) rounds rank 0 holds the total; the way down is the same
rounds backwards. 2 ceil(lg p) rounds of the whole vector: 2 lg p (α + n β) + lg p · n γ. Source:
Iandola et al. 2016 (FireCaffe); Thakur, Rabenseifner, Gropp 2005.
"""

from collections.abc import Iterator
from functools import partial

from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer


def schedule(world_size: int, num_elements: int) -> Schedule:
    return Schedule(
        "tree",
        world_size,
        num_elements,
        partial(rounds, world_size, num_elements),
        num_rounds=2 * num_levels(world_size),
        num_messages=2 * (world_size - 1),
        sent_elements=2 * (world_size - 1) * num_elements,
        in_tree_order=True,
        busiest=[0],  # the root
    )


def rounds(p: int, n: int, rank: int) -> Iterator[OwnRound]:
    edges = [(level, *ends) for level in range(num_levels(p)) if (ends := _edge(p, level, rank))]
    for level, child, parent in edges:
        yield level, [Transfer(child, parent, 0, n, reduce=True)]
    for level, child, parent in reversed(edges):
        yield 2 * num_levels(p) - 1 - level, [Transfer(parent, child, 0, n, reduce=False)]


def num_levels(world_size: int) -> int:
    return (world_size - 1).bit_length()


def _edge(p: int, level: int, rank: int) -> tuple[int, int] | None:
    parent = rank >> (level + 1) << (level + 1)
    child = parent + (1 << level)
    return (child, parent) if rank in (child, parent) and child < p else None
