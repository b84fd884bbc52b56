"""Sharded parameter server: rank r is the server of shard r; all ports work at once.

Everybody sends shard r to rank r, which adds the p parts in tree order and sends the sum back
to everybody: two rounds of p - 1 messages at each rank, 2 (p - 1) / p · n elements, the least
possible. The receivers of one message all wait for the same p - 1 senders (incast), so each
rank starts with its right-hand neighbor.

Source: Li et al., OSDI 2014; the same transfers as a direct reduce-scatter and all-gather.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer, equal_cuts


def schedule(
    world_size: int, num_elements: int, *, grain: int = 1, cuts: Sequence[int] = ()
) -> Schedule:
    """grain: shards are of whole grains, but that the last grain may be shorter. cuts: where they
    begin and, last, end, if they are others.
    """
    return Schedule(
        "sharded_parameter_server",
        world_size,
        num_elements,
        partial(_rounds, world_size, num_elements, grain, cuts),
        num_rounds=2,
        num_messages=2 * (world_size - 1) * world_size,
        sent_elements=2 * (world_size - 1) * num_elements,
        in_tree_order=True,
        # Whose shard is the longest.
        busiest=[world_size - 1] if grain == 1 and not cuts else None,
        cuts=tuple(cuts),
    )


def _rounds(p: int, n: int, grain: int, cuts: Sequence[int], rank: int) -> Iterator[OwnRound]:
    ends = cuts or equal_cuts(n, p, grain)
    others = [(rank + distance) % p for distance in range(1, p)]
    pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
    yield 0, [Transfer(a, b, ends[b], ends[b + 1], reduce=True) for a, b in pairs]
    yield 1, [Transfer(a, b, ends[a], ends[a + 1], reduce=False) for a, b in pairs]
