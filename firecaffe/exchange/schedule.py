"""A collective as a value: rounds of transfers between ranks.

A `Schedule` says which rank sends which slice to which. It is asked for one rank's rounds at a
time, because thousands of ranks have millions of transfers. It is executed over a process group
(`transport.execute`), interpreted in one process and proved (`exchange.proof`), priced
(`planner.price`) and drawn (`exchange.draw`); the last four use the union over ranks.

Every rank has one vector, in which the schedule begins and ends (`VECTOR`). A rank that holds
several nodes of the micro-batch tree has a read-only input for each instead, and an empty vector.

All transfers of a round read what was there when the round began. A transfer that does not reduce
overwrites its slice. Transfers that reduce into one slice of a rank are added, with what the rank
has itself, in one fixed order: vectors by `tree_sum` over rank, inputs by the tree over leaves.
Inputs may arrive in several rounds; they are kept until all are there.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from firecaffe.exchange.leaves import Node

BYTES_PER_ELEMENT = 4
"""Vectors are float32."""

VECTOR = -1
"""The number in `Transfer.reads` that stands for the source's vector, not an input."""

ALL_REDUCE, AVERAGE, REDUCE_SCATTER = "all_reduce", "average", "reduce_scatter"
ALL_GATHER, BROADCAST, ALL_TO_ALL = "all_gather", "broadcast", "all_to_all"
KINDS = (ALL_REDUCE, AVERAGE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL)
"""The kinds, as in MPI; rank r has shard r after a reduce-scatter and before an all-gather."""


class Transfer(NamedTuple):
    """A message of elements [start, stop), which `destination` adds or overwrites."""

    source: int
    """The rank that sends."""
    destination: int
    """The rank that receives."""
    start: int
    """The first element."""
    stop: int
    """The element after the last."""
    reduce: bool
    """Whether the destination adds, instead of overwriting."""
    reads: int = VECTOR
    """The number of the input that is sent, counted over all ranks; or VECTOR."""

    @property
    def num_elements(self) -> int:
        """The number of elements that are sent."""
        return self.stop - self.start


Round = tuple[Transfer, ...]

OwnRound = tuple[int, list[Transfer]]
"""One round as one rank sees it: its number, and the rank's transfers."""


@dataclass(frozen=True)
class Schedule:
    """A collective on vectors of `num_elements` elements, over `world_size` ranks."""

    algorithm: str
    """The name of the algorithm."""
    world_size: int
    """The number of ranks."""
    num_elements: int
    """The elements of each rank's vector."""
    of_rank: Callable[[int], Iterator[OwnRound]] = field(repr=False, compare=False)
    """A function that yields a rank's rounds; `rounds_of` leaves out empty ones."""
    # Totals over all ranks, known without asking each rank; tests compare them with the union.
    num_rounds: int
    """The number of rounds; they are numbered from 0, and some may be empty."""
    num_messages: int
    """The number of messages of all ranks, if none is empty, without those through memory."""
    sent_elements: int
    """The elements that all ranks together send in messages."""
    in_tree_order: bool = False
    """Whether elements are added in the order of the tree over ranks, or over inputs' leaves."""
    busiest: Sequence[int] | None = None
    """Ranks among which each round has its busiest port; None if that may be any rank."""
    kind: str = ALL_REDUCE
    """One of `KINDS`."""
    inputs: tuple[tuple[Node, ...], ...] = field(default=(), repr=False)
    """The nodes that are inputs, by rank; they are numbered in this order over all ranks."""
    num_leaves: int = 0
    """The leaves of the nodes' tree."""
    ranks_per_memory: int = 1
    """The number of consecutive ranks whose shared memory carries their transfers."""
    early_rounds: int = 0
    """The number of first rounds, of inputs only, that can run long before the others."""
    cuts: tuple[int, ...] = field(default=(), repr=False)
    """The ends of shards that stay with their ranks, from 0; empty if shards are equal."""
    whole: tuple[Round, ...] | None = field(default=None, repr=False)
    """All rounds, if the schedule was made by `from_rounds`."""

    @property
    def own_shards(self) -> list[tuple[int, int]]:
        """The shard of each rank."""
        if self.cuts:
            return list(pairwise(self.cuts))
        return shards(self.num_elements, self.world_size)

    def rounds_of(self, rank: int) -> Iterator[OwnRound]:
        """Yield the rounds in which the rank sends or receives anything."""
        for number, transfers in self.of_rank(rank):
            not_empty = [t for t in transfers if t.start != t.stop]
            if not_empty:
                yield number, not_empty

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """All rounds that are not empty, by source. Raises: ValueError if two ranks disagree."""
        if self.whole is not None:
            return self.whole
        sent: dict[int, list[Transfer]] = defaultdict(list)
        received: dict[int, Counter[Transfer]] = defaultdict(Counter)
        for rank in range(self.world_size):
            for number, transfers in self.rounds_of(rank):
                sent[number] += [t for t in transfers if t.source == rank]
                received[number].update(t for t in transfers if t.destination == rank)
        for number in {*sent, *received}:
            if apart := (Counter(sent[number]) - received[number]) + (
                received[number] - Counter(sent[number])
            ):
                raise ValueError(f"round {number}: only one end knows of {next(iter(apart))}")
        return tuple(tuple(sent[number]) for number in sorted(sent))

    def own_inputs(self, rank: int) -> range:
        """Return the numbers of a rank's inputs; empty if ranks have vectors."""
        if not self.inputs:
            return range(0)
        first = sum(map(len, self.inputs[:rank]))
        return range(first, first + len(self.inputs[rank]))

    def in_memory(self, t: Transfer) -> bool:
        """Whether a transfer is a read and a write of shared memory, instead of a message."""
        return t.source // self.ranks_per_memory == t.destination // self.ranks_per_memory

    def only(self, keeps: Callable[[int, Transfer], bool], **changes: Any) -> "Schedule":
        """Return the transfers that `keeps(number of the round, transfer)`, with changed fields."""

        def of_rank(rank: int) -> Iterator[OwnRound]:
            for number, transfers in self.rounds_of(rank):
                yield number, [t for t in transfers if keeps(number, t)]

        return replace(self, of_rank=of_rank, whole=None, **changes)

    def late(self) -> "Schedule":
        """Return the rounds after the early ones: no complete schedule, only to be priced."""
        return self.only(lambda number, _: number >= self.early_rounds, early_rounds=0)

    def by_messages(self) -> "Schedule":
        """Return the schedule without the transfers through shared memory."""
        return self.only(lambda _, t: not self.in_memory(t), ranks_per_memory=1)

    def transfers(self) -> Iterable[Transfer]:
        """Yield the transfers of all rounds, one after the other."""
        return (transfer for round_ in self.rounds for transfer in round_)

    @cached_property
    def ends(self) -> list[int]:
        """The ends, from 0, of the slices that no transfer, shard or block cuts."""
        slices = [(0, self.num_elements), *((t.start, t.stop) for t in self.transfers())]
        if self.kind in (REDUCE_SCATTER, ALL_GATHER):
            slices += self.own_shards
        elif self.kind == ALL_TO_ALL:
            slices += shards(self.num_elements, self.world_size**2)
        return sorted({end for slice_ in slices for end in slice_})

    def elements_of_busiest_rank(self) -> int:
        """Return the most elements that one rank sends, or receives, in messages."""
        most = 0
        for rank in range(self.world_size):
            sent = received = 0
            for _, transfers in self.by_messages().rounds_of(rank):
                sent += sum(t.stop - t.start for t in transfers if t.source == rank)
                received += sum(t.stop - t.start for t in transfers if t.destination == rank)
            most = max(most, sent, received)
        return most

    def serial_elements(self) -> int:
        """Return elements through the busiest port, summed over rounds: what β multiplies."""
        return self._serial[0]

    def serial_messages(self) -> int:
        """Return messages through the busiest port, summed over rounds: what α multiplies."""
        return self._serial[1]

    def serial_additions(self) -> int:
        """Return additions of the rank that adds most, summed over rounds: what γ multiplies."""
        return self._serial[2]

    @cached_property
    def _serial(self) -> tuple[int, int, int]:
        most: dict[int, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
        ranks = range(self.world_size) if self.busiest is None else self.busiest
        for rank in ranks:
            for number, transfers in self.rounds_of(rank):
                sent = [t for t in transfers if not self.in_memory(t)]
                # A port sends and receives at once (full duplex); rounds follow each other.
                out = [t.stop - t.start for t in sent if t.source == rank]
                into = [t.stop - t.start for t in sent if t.destination == rank]
                added = sum(
                    t.stop - t.start for t in transfers if t.destination == rank and t.reduce
                )
                before = most[number]
                most[number] = (
                    max(before[0], sum(out), sum(into)),
                    max(before[1], len(out), len(into)),
                    max(before[2], added),
                )
        elements, messages, additions = zip(*most.values(), strict=True) if most else ((), (), ())
        return sum(elements), sum(messages), sum(additions)


def from_rounds(
    algorithm: str, world_size: int, num_elements: int, rounds: Iterable[Iterable[Transfer]]
) -> Schedule:
    """Make a schedule from explicit rounds, without its empty transfers and rounds."""
    kept = (tuple(t for t in round_ if t.start != t.stop) for round_ in rounds)
    whole = tuple(round_ for round_ in kept if round_)

    def of_rank(rank: int) -> Iterator[OwnRound]:
        for number, round_ in enumerate(whole):
            yield number, [t for t in round_ if rank in (t.source, t.destination)]

    return Schedule(
        algorithm,
        world_size,
        num_elements,
        of_rank,
        num_rounds=len(whole),
        num_messages=sum(map(len, whole)),
        sent_elements=sum(t.num_elements for round_ in whole for t in round_),
        whole=whole,
    )


def lower_bound_elements(world_size: int, num_elements: int) -> float:
    """Return the fewest elements of any busiest rank (Patarasuk and Yuan 2009, theorem 1)."""
    return 2 * (world_size - 1) / world_size * num_elements


def shard(num_elements: int, parts: int, index: int) -> tuple[int, int]:
    """Return one of `parts` slices that cover the vector in order, as equal as they can be."""
    return num_elements * index // parts, num_elements * (index + 1) // parts


def shards(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """Return all slices of `shard`, in order."""
    return list(pairwise(equal_cuts(num_elements, parts)))


def equal_cuts(num_elements: int, parts: int, grain: int = 1) -> list[int]:
    """Return the ends of `parts` slices, from 0, in whole grains; the last may be shorter."""
    grains = -(-num_elements // grain)
    return [min(grains * i // parts * grain, num_elements) for i in range(parts + 1)]


PIECES = 4
"""Most pieces of a vector; twice as many if each would exceed LONGEST_PIECE_BYTES."""

LONGEST_PIECE_BYTES = 4_000_000
"""The longest piece: longer messages of two pieces may meet in a switch's queue."""

SHORTEST_MESSAGE_BYTES = 512_000
"""Least mean bytes of a piece's messages; each takes Python some 140 us (LOG.md)."""

SHORTEST_WHOLE_BYTES = 128_000
"""Least bytes if each message is a whole piece, or sums are not in tree order."""


def pieces(schedule: Schedule, itemsize: int) -> list[tuple[int, int]]:
    """Cut a schedule's vector into pieces, (start, stop) each, which go through it in parallel.

    While one piece is being added, or waits for a slow peer, the others keep the link busy. If a
    schedule already cuts its vector into short messages, it is not cut again. itemsize: bytes per
    element.
    """
    mean_bytes = schedule.sent_elements * itemsize // max(1, schedule.num_messages)
    whole_bytes = schedule.num_elements * itemsize
    most = 2 * PIECES if whole_bytes > PIECES * LONGEST_PIECE_BYTES else PIECES
    is_kept = mean_bytes == whole_bytes or not schedule.in_tree_order
    # In a tree, pieces also fill the links of later rounds. If sums are not in tree order, the cuts
    # decide their bits, so the cuts stay those of earlier runs.
    shortest = SHORTEST_WHOLE_BYTES if is_kept else SHORTEST_MESSAGE_BYTES
    count = max(1, min(most, mean_bytes // shortest))
    return shards(schedule.num_elements, count)
