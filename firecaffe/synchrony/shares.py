"""Balanced shares: each worker gets as many micro-batches as it computes in the same time.

Micro-batches are the leaves of one fixed tree, so shares change no bit of the sum. The best shares
make the slowest worker as fast as whole micro-batches allow: a worker computes `floor(limit /
seconds)` leaves within a time limit. Of shares that are about as fast, dynamic programming over the
boundaries between workers finds those whose busiest worker holds and sends (`exchange.fold`) the
fewest nodes of the tree, then those with the fewest nodes in all.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import count, pairwise

from firecaffe.exchange.leaves import Shares, largest_nodes

TOLERANCE = 0.02
"""How much longer than the best a step may take for the sake of fewer nodes."""

# Measured times vary by a few per cent, and a change discards what was read ahead.
GAIN = 0.04
"""How much shorter a step must become for shares to change."""


def next_shares(num_leaves: int, seconds: Sequence[float], current: Shares) -> Shares:
    """Return the next steps' shares: `current`, unless balanced ones are faster by GAIN.

    There is a leaf for each worker. `seconds` are times per leaf; those not positive are ignored.
    """
    seconds = _positive(seconds)
    best = balanced_shares(num_leaves, seconds)
    is_worth_it = longest_s(best, seconds) < (1 - GAIN) * longest_s(current, seconds)
    return best if is_worth_it else current


def longest_s(shares: Shares, seconds: Sequence[float]) -> float:
    return max(len(share) * leaf_s for share, leaf_s in zip(shares, seconds, strict=True))


def balanced_shares(num_leaves: int, seconds: Sequence[float]) -> Shares:
    """Return consecutive shares of at least one leaf that minimize the longest time.

    It may be longer by TOLERANCE for fewer nodes. Raises: ValueError for more workers than leaves.
    """
    if len(seconds) > num_leaves:
        raise ValueError(f"{len(seconds)} workers for {num_leaves} micro-batches")
    limit = _shortest(num_leaves, seconds) * (1 + TOLERANCE)
    most = _within(limit, seconds, num_leaves)
    candidates = (_fewest_nodes(num_leaves, seconds, most, cap) for cap in count(1))
    return next(shares for shares in candidates if shares)


def _fewest_nodes(
    num_leaves: int, seconds: Sequence[float], most: Sequence[int], most_nodes: int
) -> Shares:
    # By the start of the next worker's share: (fewest nodes before it, longest time, boundaries).
    reached: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, (0,))}
    for rank, leaf_s in enumerate(seconds):
        fewest_left = len(seconds) - rank - 1
        most_left = sum(most[rank + 1 :])
        following: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for start, (nodes, taken, bounds) in reached.items():
            first = max(start + 1, num_leaves - most_left)
            last = min(start + most[rank], num_leaves - fewest_left)
            for stop in range(first, last + 1):
                num_nodes = _num_nodes(num_leaves, start, stop)
                if num_nodes > most_nodes:
                    continue
                longest = max(taken, (stop - start) * leaf_s)
                candidate = (nodes + num_nodes, longest, (*bounds, stop))
                if stop not in following or candidate < following[stop]:
                    following[stop] = candidate
        reached = following
    if num_leaves not in reached:
        return ()
    bounds = reached[num_leaves][2]
    return tuple(range(a, b) for a, b in pairwise(bounds))


def _shortest(num_leaves: int, seconds: Sequence[float]) -> float:
    # The shortest step time is some worker's time for a whole number of leaves.
    times = sorted({count * leaf_s for leaf_s in seconds for count in range(1, num_leaves + 1)})
    return times[bisect_left(times, True, key=lambda limit: _is_enough(limit, seconds, num_leaves))]


def _is_enough(limit: float, seconds: Sequence[float], num_leaves: int) -> bool:
    most = _within(limit, seconds, num_leaves)
    return min(most) >= 1 and sum(most) >= num_leaves


def _within(limit: float, seconds: Sequence[float], num_leaves: int) -> list[int]:
    counts = []
    for leaf_s in seconds:
        count = min(int(limit / leaf_s), num_leaves)
        # A quotient may be rounded up or down.
        while count * leaf_s > limit:
            count -= 1
        while count < num_leaves and (count + 1) * leaf_s <= limit:
            count += 1
        counts.append(count)
    return counts


def _positive(seconds: Sequence[float]) -> list[float]:
    least = min((leaf_s for leaf_s in seconds if 0 < leaf_s < float("inf")), default=1.0)
    return [leaf_s if 0 < leaf_s < float("inf") else least for leaf_s in seconds]


@cache
def _num_nodes(num_leaves: int, start: int, stop: int) -> int:
    return len(largest_nodes(num_leaves, range(start, stop)))
