"""Halving-doubling: swap halves, then quarters, …; then gather the pieces on the way back.

The way down is a reduce-scatter. In round k a rank and the one 2^k away split the slice that they
share; each sends the half that it gives up and adds to the half that it keeps. The way up is the
same rounds backwards, copying: 2 lg p rounds, 2 (p - 1) / p · n elements, the least possible.
Distance 1 comes first, so that additions are in tree order. If p is not 2^k: see `power_of_two`.
Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005.
"""

from collections.abc import Iterator
from functools import partial

from firecaffe.exchange.power_of_two import around, is_tree_after_pairing, largest_power_of_two
from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer


def schedule(world_size: int, num_elements: int) -> Schedule:
    p, n = world_size, num_elements
    q = largest_power_of_two(p)
    levels = q.bit_length() - 1
    return Schedule(
        "halving_doubling",
        p,
        n,
        partial(around, p, n, 2 * levels, partial(_rounds, q, n)),
        num_rounds=2 * levels + 2,
        num_messages=2 * q * levels + 2 * (p - q),
        sent_elements=(2 * (q - 1) + 2 * (p - q)) * n,
        in_tree_order=is_tree_after_pairing(p),
        busiest=[0, p - 1],  # rank 0 also has the rounds of its pair, rank p - 1 the longest halves
    )


def _rounds(q: int, n: int, rank: int) -> Iterator[OwnRound]:
    levels = q.bit_length() - 1
    others = [rank ^ 1 << level for level in range(levels)]
    # Two partners share one slice until they part: what one gives up is what the other keeps.
    for level, other in enumerate(others):
        leaves = Transfer(rank, other, *_kept(n, level + 1, other), True)
        yield level, [leaves, Transfer(other, rank, *_kept(n, level + 1, rank), True)]
    for level, other in reversed(list(enumerate(others))):
        leaves = Transfer(rank, other, *_kept(n, level + 1, rank), False)
        arrives = Transfer(other, rank, *_kept(n, level + 1, other), False)
        yield 2 * levels - 1 - level, [leaves, arrives]


def _kept(n: int, splits: int, rank: int) -> tuple[int, int]:
    # After the k-th split a rank keeps the upper half if its bit k is 1.
    start, stop = 0, n
    for level in range(splits):
        middle = (start + stop) // 2
        start, stop = (middle, stop) if rank >> level & 1 else (start, middle)
    return start, stop
