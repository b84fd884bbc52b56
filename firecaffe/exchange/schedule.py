"""A gradient exchange as a value: rounds of transfers between ranks.

A `Schedule` says who sends which slice to whom, and nothing about how. The same value is
executed over a process group (`transport.execute`), interpreted in one process
(`transport.interpret`), proved (`exchange.proof`) and drawn (`exchange.draw`).

What a round means: all its transfers read the vectors as they were when the round began. A
transfer that does not reduce overwrites the destination's slice. The transfers of one round
that reduce into one slice of one destination are added together with the destination's own
slice in one `fold` over rank, so that even a server that hears from everybody at once adds in
a fixed order.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transfer:
    """`source` sends its elements [start, stop) to `destination`, which adds or overwrites."""

    source: int
    destination: int
    start: int
    stop: int
    reduce: bool

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


Round = tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """An all-reduce of `num_elements` elements over `world_size` ranks."""

    algorithm: str
    world_size: int
    num_elements: int
    rounds: tuple[Round, ...]

    def elements_of_busiest_rank(self) -> int:
        """The most elements that one rank sends, or receives, in the whole exchange."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for transfer in self.transfers():
            sent[transfer.source] += transfer.num_elements
            received[transfer.destination] += transfer.num_elements
        return max((*sent.values(), *received.values()), default=0)

    def serial_elements(self) -> int:
        """Elements through the busiest port, summed over rounds: what β multiplies.

        A port sends and receives at once (full duplex); rounds follow each other.
        """
        return sum(_busiest_port(round_, lambda t: t.num_elements) for round_ in self.rounds)

    def serial_messages(self) -> int:
        """Messages through the busiest port, summed over rounds: what α multiplies."""
        return sum(_busiest_port(round_, lambda t: 1) for round_ in self.rounds)

    def serial_additions(self) -> int:
        """Additions of the rank that adds most, summed over rounds: what γ multiplies."""
        additions = 0
        for round_ in self.rounds:
            per_rank: Counter[int] = Counter()
            for transfer in round_:
                per_rank[transfer.destination] += transfer.num_elements * transfer.reduce
            additions += max(per_rank.values(), default=0)
        return additions

    def transfers(self) -> Iterable[Transfer]:
        return (transfer for round_ in self.rounds for transfer in round_)


def lower_bound_elements(world_size: int, num_elements: int) -> float:
    """Elements that the busiest rank of any all-reduce must send: 2 (p - 1) / p · n.

    Source: Patarasuk and Yuan 2009, theorem 1.
    """
    return 2 * (world_size - 1) / world_size * num_elements


def make_schedule(
    algorithm: str, world_size: int, num_elements: int, rounds: Iterable[Iterable[Transfer]]
) -> Schedule:
    """A checked schedule without its empty transfers and empty rounds."""
    kept = (tuple(t for t in round_ if t.num_elements) for round_ in rounds)
    schedule = Schedule(algorithm, world_size, num_elements, tuple(r for r in kept if r))
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Refuses a schedule whose meaning would depend on timing.

    Raises: ValueError where a transfer leaves the ranks or the vector, where two transfers of a
    round write overlapping slices (other than additions to the very same slice), where a rank
    sends a slice that the same round overwrites, or where one rank sends another two messages in
    one round, which the receiver could not tell apart.
    """
    for index, round_ in enumerate(schedule.rounds):
        writes: dict[int, dict[tuple[int, int], bool]] = defaultdict(dict)
        sends: dict[int, set[tuple[int, int]]] = defaultdict(set)
        pairs: set[tuple[int, int]] = set()
        for t in round_:
            if (t.source, t.destination) in pairs:
                raise ValueError(f"round {index}: {t} is a second message between its two ranks")
            pairs.add((t.source, t.destination))
            if not (
                0 <= t.source < schedule.world_size and 0 <= t.destination < schedule.world_size
            ):
                raise ValueError(
                    f"round {index}: {t} names a rank outside 0..{schedule.world_size - 1}"
                )
            if t.source == t.destination:
                raise ValueError(f"round {index}: {t} sends to itself")
            if not 0 <= t.start <= t.stop <= schedule.num_elements:
                raise ValueError(f"round {index}: {t} leaves 0..{schedule.num_elements}")
            written = writes[t.destination]
            slice_ = (t.start, t.stop)
            if slice_ in written and not (t.reduce and written[slice_]):
                raise ValueError(f"round {index}: {t} overwrites what another transfer brings")
            written[slice_] = t.reduce
            sends[t.source].add(slice_)
        for rank, written in writes.items():
            slices = sorted(written)
            for (_, stop), (start, _) in pairwise(slices):
                if start < stop:
                    raise ValueError(f"round {index}: overlapping slices arrive at rank {rank}")
            for start, stop in (s for s, reduce in written.items() if not reduce):
                if any(a < stop and start < b for a, b in sends[rank]):
                    raise ValueError(f"round {index}: rank {rank} sends what it is overwriting")


def fold(values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Adds neighbors, then neighbors of the sums, and so on: the fixed binary tree.

    Node (k, j) of the tree is the sum of values [j 2^k, (j + 1) 2^k), clipped at the end; an
    odd last value goes up unchanged. This one function is the order of additions everywhere.
    """
    level = list(values)
    while len(level) > 1:
        pairs = [add(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def shards(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """`parts` consecutive slices that cover the vector, their lengths differing by at most 1."""
    cuts = [num_elements * i // parts for i in range(parts + 1)]
    return list(pairwise(cuts))


def _busiest_port(round_: Round, weight: Callable[[Transfer], int]) -> int:
    load: Counter[tuple[str, int]] = Counter()
    for transfer in round_:
        load["out", transfer.source] += weight(transfer)
        load["in", transfer.destination] += weight(transfer)
    return max(load.values(), default=0)
