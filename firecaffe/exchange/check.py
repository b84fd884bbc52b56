"""Refuses a schedule whose meaning would depend on timing."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from firecaffe.exchange.schedule import VECTOR, Schedule, Transfer


def check(schedule: Schedule) -> None:
    """Checks all rounds, all ranks together.

    Raises: ValueError, as `check_round`.
    """
    for index, round_ in enumerate(schedule.rounds):
        check_round(index, round_, schedule)


def check_round(number: int, transfers: Sequence[Transfer], schedule: Schedule) -> None:
    """Checks all transfers of a round, or those of one rank: no rule is about more than one rank.

    Raises: ValueError if a transfer leaves the ranks or the vector, if two transfers of a
    round write overlapping slices (other than additions to the very same slice), if a rank
    sends a slice that the same round overwrites, if inputs and vectors are added together, or if
    one rank sends another two messages of one round from one place, which the receiver could not
    tell apart.
    """
    writes: dict[int, dict[tuple[int, int], tuple[bool, bool]]] = defaultdict(dict)
    sends: dict[int, set[tuple[int, int]]] = defaultdict(set)
    pairs: set[tuple[int, int, int]] = set()
    for t in transfers:
        if (t.source, t.destination, t.reads) in pairs:
            raise ValueError(f"round {number}: {t} is a second message between its two ranks")
        pairs.add((t.source, t.destination, t.reads))
        if not (0 <= t.source < schedule.world_size and 0 <= t.destination < schedule.world_size):
            raise ValueError(
                f"round {number}: {t} names a rank outside 0..{schedule.world_size - 1}"
            )
        if t.source == t.destination:
            raise ValueError(f"round {number}: {t} sends to itself")
        if not 0 <= t.start <= t.stop <= schedule.num_elements:
            raise ValueError(f"round {number}: {t} leaves 0..{schedule.num_elements}")
        written = writes[t.destination]
        slice_ = (t.start, t.stop)
        how = t.reduce, t.reads == VECTOR
        if slice_ in written and not (t.reduce and written[slice_][0]):
            raise ValueError(f"round {number}: {t} overwrites what another transfer brings")
        if written.setdefault(slice_, how) != how:
            raise ValueError(f"round {number}: {t} is added to a sum of inputs, or an input to it")
        if t.reads == VECTOR:
            sends[t.source].add(slice_)
    for rank, written in writes.items():
        slices = sorted(written)
        for (_, stop), (start, _) in pairwise(slices):
            if start < stop:
                raise ValueError(f"round {number}: overlapping slices arrive at rank {rank}")
        for start, stop in (s for s, (reduce, _) in written.items() if not reduce):
            if any(a < stop and start < b for a, b in sends[rank]):
                raise ValueError(f"round {number}: rank {rank} sends what it is overwriting")
