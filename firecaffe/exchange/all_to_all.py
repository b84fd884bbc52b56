"""All-to-all: every rank sends a different block to every other rank.

The vector is p · p blocks; block a · p + b is what rank a has for rank b. Rank r begins with its
row and ends with its column, after one round of p - 1 messages at each rank. Each rank starts with
its next neighbor, so that not all send to one rank at once (incast). Source: Bruck et al. 1997,
section 3 (the direct exchange).
"""

from collections.abc import Iterator
from functools import partial

from firecaffe.exchange.schedule import ALL_TO_ALL, OwnRound, Schedule, Transfer, shard


def schedule(world_size: int, num_elements: int) -> Schedule:
    p, n = world_size, num_elements
    stays = sum(stop - start for rank in range(p) for start, stop in [block(n, p, rank, rank)])
    return Schedule(
        "direct",
        p,
        n,
        partial(_rounds, p, n),
        num_rounds=1,
        num_messages=(p - 1) * p,
        sent_elements=n - stays,
        in_tree_order=True,  # nothing is added
        kind=ALL_TO_ALL,
    )


def block(num_elements: int, world_size: int, source: int, destination: int) -> tuple[int, int]:
    """Return the elements of the vector that rank `source` has for rank `destination`."""
    return shard(num_elements, world_size * world_size, source * world_size + destination)


def _rounds(p: int, n: int, rank: int) -> Iterator[OwnRound]:
    others = [(rank + distance) % p for distance in range(1, p)]
    pairs = [(rank, other) for other in others] + [(other, rank) for other in others]
    yield 0, [Transfer(a, b, *block(n, p, a, b), reduce=False) for a, b in pairs]
