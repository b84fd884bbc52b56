"""Ring: p chunks of the vector travel around, first gathering sums, then as sums.

In each of 2 (p - 1) rounds every rank sends one chunk to its right-hand neighbor, so every port
carries 2 (p - 1) / p · n elements, the least possible. Each chunk is summed along the ring from
another starting rank, so not in tree order. Source: Patarasuk and Yuan 2009; Thakur, Rabenseifner,
Gropp 2005.
"""

from collections.abc import Iterator
from functools import partial

from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer, shard


def schedule(world_size: int, num_elements: int, *, first: int = 0) -> Schedule:
    """Let a rank first send the chunk `first` places from its own; with -1 it ends with its own."""
    num_rounds = 2 * (world_size - 1)
    return Schedule(
        "ring",
        world_size,
        num_elements,
        partial(_rounds, world_size, num_elements, first),
        num_rounds=num_rounds,
        num_messages=num_rounds * world_size,
        sent_elements=num_rounds * num_elements,
        in_tree_order=world_size <= 2,
    )


def _rounds(p: int, n: int, first: int, rank: int) -> Iterator[OwnRound]:
    left, right = (rank - 1) % p, (rank + 1) % p
    for number in range(2 * (p - 1)):
        # A rank passes on the chunk that it was sent in the round before.
        is_sum = number < p - 1
        arrives = Transfer(left, rank, *shard(n, p, (left + first - number) % p), is_sum)
        leaves = Transfer(rank, right, *shard(n, p, (rank + first - number) % p), is_sum)
        yield number, [arrives, leaves]
