"""Recursive doubling: in round k every rank swaps its whole vector with the rank 2^k away.

It takes lg p rounds, the fewest possible, of the whole vector: lg p (α + n β + n γ), for small
vectors. After round k each rank holds the sum of its aligned block of 2^(k + 1) ranks: tree order.
For p that is not a power of two: `power_of_two`. Source: Thakur, Rabenseifner, Gropp 2005.
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
        "recursive_doubling",
        p,
        n,
        partial(around, p, n, levels, partial(_rounds, q, n)),
        num_rounds=levels + 2,
        num_messages=q * levels + 2 * (p - q),
        sent_elements=(q * levels + 2 * (p - q)) * n,
        in_tree_order=is_tree_after_pairing(p),
        busiest=[0],
    )


def _rounds(q: int, n: int, rank: int) -> Iterator[OwnRound]:
    for level in range(q.bit_length() - 1):
        other = rank ^ 1 << level
        yield level, [Transfer(a, b, 0, n, True) for a, b in ((rank, other), (other, rank))]
