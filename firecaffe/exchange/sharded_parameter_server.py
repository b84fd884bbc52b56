"""Sharded parameter server: rank r is the server of shard r; all ports work at once.

All ranks send shard r to rank r, which adds the p parts in tree order and sends the sum back: two
rounds of p - 1 messages at each rank, 2 (p - 1) / p · n elements, the least possible. Source: Li et
al., OSDI 2014; the same transfers as a direct reduce-scatter and all-gather.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from firecaffe.exchange.schedule import OwnRound, Schedule, Transfer, equal_cuts


def schedule(
    world_size: int, num_elements: int, *, grain: int = 1, cuts: Sequence[int] = ()
) -> Schedule:
    """Make shards of whole grains (the last may be shorter), or between the ends in `cuts`."""
    return Schedule(
        "sharded_parameter_server",
        world_size,
        num_elements,
        partial(_rounds, world_size, num_elements, grain, cuts),
        num_rounds=2,
        num_messages=2 * (world_size - 1) * world_size,
        sent_elements=2 * (world_size - 1) * num_elements,
        in_tree_order=True,
        # The last rank has the longest shard.
        busiest=[world_size - 1] if grain == 1 and not cuts else None,
        cuts=tuple(cuts),
    )


def _rounds(p: int, n: int, grain: int, cuts: Sequence[int], rank: int) -> Iterator[OwnRound]:
    ends = cuts or equal_cuts(n, p, grain)
    pairs = with_all_others(p, rank)
    yield 0, [Transfer(a, b, ends[b], ends[b + 1], reduce=True) for a, b in pairs]
    yield 1, [Transfer(a, b, ends[a], ends[a + 1], reduce=False) for a, b in pairs]


def with_all_others(p: int, rank: int) -> list[tuple[int, int]]:
    """Return source and destination of a rank's messages to all others, and from them."""
    # Each rank starts with its next neighbor, so that not all send to one at once (incast).
    others = [(rank + distance) % p for distance in range(1, p)]
    return [(rank, other) for other in others] + [(other, rank) for other in others]
