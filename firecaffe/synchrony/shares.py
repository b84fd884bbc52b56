"""Balanced shares: each worker gets as many micro-batches as it computes in the same time.

The micro-batches of a step are the leaves of one fixed tree, and who computes a leaf changes no
bit of the sum. So a worker that takes twice as long gets half as many, and all are done at the same
time. A step then takes as long as the worker whose share takes longest; the best shares make that
time the shortest that whole micro-batches allow.

Among shares that take about as long, those are taken whose busiest worker holds the fewest nodes of
the tree, then those of the fewest nodes in all: a worker sends each of its nodes (`exchange.fold`).

The smallest longest time is found directly (a worker can compute `floor(limit / seconds)` leaves
within a limit); the fewest nodes by dynamic programming over the boundaries between workers.
"""

from collections.abc import Sequence
from functools import cache
from itertools import count, pairwise

from firecaffe.exchange.leaves import Shares, largest_nodes

TOLERANCE = 0.02
"""How much longer than the best a step may take for the sake of fewer nodes."""

GAIN = 0.04
"""How much shorter a step must become for shares to change: measured times differ by a few per cent
from one time to the next, and a change costs what was read ahead."""


def next_shares(num_leaves: int, seconds: Sequence[float], current: Shares) -> Shares:
    """The shares of the next steps: those that fit the workers, or the current ones if the others
    would not be faster by GAIN.

    Args:
        num_leaves: Micro-batches of a step, at least one for each worker.
        seconds: What each worker takes for one; what is not positive says nothing.
        current: The shares now.
    """
    seconds = _positive(seconds)
    best = balanced_shares(num_leaves, seconds)
    is_worth_it = longest_s(best, seconds) < (1 - GAIN) * longest_s(current, seconds)
    return best if is_worth_it else current


def longest_s(shares: Shares, seconds: Sequence[float]) -> float:
    """How long the worker computes whose share takes longest."""
    return max(len(share) * each for share, each in zip(shares, seconds, strict=True))


def balanced_shares(num_leaves: int, seconds: Sequence[float]) -> Shares:
    """Consecutive shares of at least one leaf each. Their longest time is the shortest that there
    is, or longer by TOLERANCE at most if that needs fewer nodes of one worker, or of all.

    Raises: ValueError if there are more workers than leaves.
    """
    if len(seconds) > num_leaves:
        raise ValueError(f"{len(seconds)} workers for {num_leaves} micro-batches")
    limit = _shortest(num_leaves, seconds) * (1 + TOLERANCE)
    most = _within(limit, seconds, num_leaves)
    found = (_fewest_nodes(num_leaves, seconds, most, cap) for cap in count(1))
    return next(shares for shares in found if shares)


def _fewest_nodes(
    num_leaves: int, seconds: Sequence[float], most: Sequence[int], most_nodes: int
) -> Shares:
    """The shares with the fewest nodes, at most so many leaves and `most_nodes` nodes each; empty
    if there are none.
    """
    # By where the next worker's share begins: the fewest nodes before it, then the longest time,
    # then the earlier boundaries; and those boundaries.
    reached: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, (0,))}
    for rank, each in enumerate(seconds):
        fewest_left = len(seconds) - rank - 1
        most_left = sum(most[rank + 1 :])
        following: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for start, (nodes, taken, bounds) in reached.items():
            first = max(start + 1, num_leaves - most_left)
            last = min(start + most[rank], num_leaves - fewest_left)
            for stop in range(first, last + 1):
                own = _num_nodes(num_leaves, start, stop)
                if own > most_nodes:
                    continue
                found = (
                    nodes + own,
                    max(taken, (stop - start) * each),
                    (*bounds, stop),
                )
                if stop not in following or found < following[stop]:
                    following[stop] = found
        reached = following
    if num_leaves not in reached:
        return ()
    bounds = reached[num_leaves][2]
    return tuple(range(a, b) for a, b in pairwise(bounds))


def _shortest(num_leaves: int, seconds: Sequence[float]) -> float:
    """The smallest longest time: some worker's for a whole number of leaves."""
    times = sorted({count * each for each in seconds for count in range(1, num_leaves + 1)})
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_enough(times[middle], seconds, num_leaves):
            high = middle
        else:
            low = middle + 1
    return times[low]


def _is_enough(limit: float, seconds: Sequence[float], num_leaves: int) -> bool:
    most = _within(limit, seconds, num_leaves)
    return min(most) >= 1 and sum(most) >= num_leaves


def _within(limit: float, seconds: Sequence[float], num_leaves: int) -> list[int]:
    """How many leaves each worker computes within a time."""
    found = []
    for each in seconds:
        count = min(int(limit / each), num_leaves)
        # A quotient may be rounded up or down.
        while count * each > limit:
            count -= 1
        while count < num_leaves and (count + 1) * each <= limit:
            count += 1
        found.append(count)
    return found


def _positive(seconds: Sequence[float]) -> list[float]:
    """The seconds; for what is not positive the smallest that is, or 1."""
    least = min((each for each in seconds if 0 < each < float("inf")), default=1.0)
    return [each if 0 < each < float("inf") else least for each in seconds]


@cache
def _num_nodes(num_leaves: int, start: int, stop: int) -> int:
    return len(largest_nodes(num_leaves, range(start, stop)))
