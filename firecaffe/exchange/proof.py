"""Proves what a schedule computes by running it on symbols instead of numbers.

Every rank starts with its own symbol; a sum is an unordered pair of earlier sums (IEEE addition
commutes, so only the pairing decides the bits). At the end each element of each rank must be a
sum that holds every symbol exactly once; and if it is the very sum that `tree_sum` builds, the
schedule adds in tree order, and no number of workers can change a bit of its result.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from firecaffe.exchange.schedule import Schedule, tree_sum


@dataclass(frozen=True, slots=True)
class Proof:
    """What a schedule was found to do, for every element of every rank."""

    complete: bool
    """Each holds every rank's contribution exactly once."""
    in_tree_order: bool
    """Each is added up in the order of the fixed binary tree over ranks."""


class _Sums:
    """Sums by number: equal sums have equal numbers, whatever way they were reached."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [1 << rank for rank in range(world_size)]
        self._by_pair: dict[tuple[int, int], int] = {}
        self.all_exact = True

    def add(self, a: int, b: int) -> int:
        pair = (min(a, b), max(a, b))
        if pair not in self._by_pair:
            if self.ranks[a] & self.ranks[b]:
                self.all_exact = False
            self._by_pair[pair] = len(self.ranks)
            self.ranks.append(self.ranks[a] | self.ranks[b])
        return self._by_pair[pair]


def prove(schedule: Schedule) -> Proof:
    """Runs the schedule symbolically; see `Proof`."""
    world_size = schedule.world_size
    sums = _Sums(world_size)
    cuts = _cuts(schedule)
    segment_at = {start: index for index, start in enumerate(cuts)}
    # held[rank][segment] is the number of the sum that the rank holds there.
    held = [[rank] * (len(cuts) - 1) for rank in range(world_size)]
    for round_ in schedule.rounds:
        arriving: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        written: dict[tuple[int, int], int] = {}
        for t in round_:
            for segment in range(segment_at[t.start], segment_at[t.stop]):
                value = held[t.source][segment]
                if t.reduce:
                    arriving[t.destination, segment].append((t.source, value))
                else:
                    written[t.destination, segment] = value
        for (rank, segment), parts in arriving.items():
            parts.append((rank, held[rank][segment]))
            written[rank, segment] = tree_sum([value for _, value in sorted(parts)], sums.add)
        for (rank, segment), value in written.items():
            held[rank][segment] = value
    tree = tree_sum(range(world_size), sums.add)
    everybody = (1 << world_size) - 1
    results = [value for row in held for value in row]
    return Proof(
        complete=sums.all_exact and all(sums.ranks[value] == everybody for value in results),
        in_tree_order=all(value == tree for value in results),
    )


def _cuts(schedule: Schedule) -> list[int]:
    ends: Iterable[int] = (end for t in schedule.transfers() for end in (t.start, t.stop))
    return sorted({0, schedule.num_elements, *ends})
