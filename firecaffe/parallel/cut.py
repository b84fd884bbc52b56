"""Cuts of a dimension into parts."""

from collections.abc import Sequence
from functools import cache

from firecaffe.exchange.schedule import shards

Cut = tuple[int, ...]
"""The ends of the parts of a dimension: part p is the elements [cut[p], cut[p + 1])."""


def cut(size: int, num_parts: int, grain: int = 1) -> Cut:
    """Cut a dimension into parts equal to within a grain. Raises: ValueError if one is empty."""
    # A grain stays together, as the filters of one group.
    if num_parts > size // grain:
        raise ValueError(f"{size // grain} cannot be cut into {num_parts} parts")
    return (0, *(stop * grain for _, stop in shards(size // grain, num_parts)))


def balanced(costs: Sequence[int], num_parts: int) -> Cut:
    """Cut elements into consecutive parts, none empty, so that the costliest one is cheapest."""

    @cache
    def best(stop: int, parts: int) -> tuple[int, Cut]:
        # The cost, and the cut, of the elements before `stop` in so many parts.
        if parts == 1:
            return sum(costs[:stop]), (0, stop)
        candidates = []
        for last in range(parts - 1, stop):
            cost, ends = best(last, parts - 1)
            candidates.append((max(cost, sum(costs[last:stop])), (*ends, stop)))
        return min(candidates)

    return best(len(costs), num_parts)[1]


def scaled(cut: Cut, by: int) -> Cut:
    return tuple(end * by for end in cut)
