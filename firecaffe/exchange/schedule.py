"""A collective as a value: rounds of transfers between ranks.

A `Schedule` says who sends which slice to whom, and nothing about how. It is asked for one rank's
rounds at a time, for at thousands of ranks there are millions of transfers, of which a rank sees
few. The same value is executed over a process group (`transport.execute`), interpreted in one
process (`transport.interpret`), priced (`plan.price`), proved (`exchange.proof`) and drawn
(`exchange.draw`); the last four make the whole of it, the union over ranks, at small world sizes.

Every rank has one vector, which the schedule begins with and ends in (`VECTOR`). A rank that holds
several nodes of the micro-batch tree has an input for each instead; inputs are only read, and
its vector holds nothing before something is written there.

What a round means: all its transfers read what was there when the round began, and write into the
destination's vector. A transfer that does not reduce overwrites the slice. The transfers of one
round that reduce into one slice of one destination are added together with what the destination
has itself, in one fixed order, so that even a server that hears from everybody at once adds alike:
vectors with its own slice by `tree_sum` over rank, inputs with its own by the tree over leaves.
Inputs may arrive for a slice in several rounds: they are kept until all are there, and added then.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from firecaffe.exchange.leaves import Node

VECTOR = -1
"""The number in `Transfer.reads` that stands for the source's vector, not an input."""

ALL_REDUCE, AVERAGE, REDUCE_SCATTER = "all_reduce", "average", "reduce_scatter"
ALL_GATHER, BROADCAST, ALL_TO_ALL = "all_gather", "broadcast", "all_to_all"
KINDS = (ALL_REDUCE, AVERAGE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, ALL_TO_ALL)
"""The kinds, by what all ranks have in the end: the total; that by the number of ranks; rank r
shard r of the total; shard r of rank r, for all r; rank 0's vector; rank r what each rank had for
it."""


class Transfer(NamedTuple):
    """`source` sends its elements [start, stop) to `destination`, which adds or overwrites."""

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
    """The number of an input, among those of all ranks; or the vector."""

    @property
    def num_elements(self) -> int:
        """The number of elements that are sent."""
        return self.stop - self.start


Round = tuple[Transfer, ...]

OwnRound = tuple[int, list[Transfer]]
"""One round as one rank sees it: its number, and the transfers in which the rank takes part."""


@dataclass(frozen=True)
class Schedule:
    """A collective on vectors of `num_elements` elements, over `world_size` ranks.

    What is said here of all ranks together is known without asking each: the tests hold it
    against the whole.
    """

    algorithm: str
    """The name of its algorithm."""
    world_size: int
    """The number of ranks."""
    num_elements: int
    """The elements of each rank's vector."""
    of_rank: Callable[[int], Iterator[OwnRound]] = field(repr=False, compare=False)
    """A rank's rounds, by number; to be asked by `rounds_of`, which leaves out what is empty."""
    num_rounds: int
    """Rounds are numbered from 0 to less than this."""
    num_messages: int
    """The number of messages of all ranks, if none is empty. What goes through memory is none."""
    sent_elements: int
    """The elements that all ranks together send in messages."""
    in_tree_order: bool = False
    """Whether every element is added up in the order of the fixed binary tree over ranks, or over
    the leaves of inputs."""
    busiest: Sequence[int] | None = None
    """Ranks among which each round has its busiest port; None if that may be any rank."""
    kind: str = ALL_REDUCE
    """One of `KINDS`."""
    inputs: tuple[tuple[Node, ...], ...] = field(default=(), repr=False)
    """The inputs of each rank, if ranks have some: nodes, numbered through in this order."""
    num_leaves: int = 0
    """The number of leaves of the nodes' tree."""
    ranks_per_memory: int = 1
    """The number of consecutive ranks that share memory, which carries what goes between them."""
    early_rounds: int = 0
    """So many first rounds carry inputs alone that may be there long before the others: they can be
    run by themselves, and the others later."""
    cuts: tuple[int, ...] = field(default=(), repr=False)
    """Where shards that stay with their ranks begin and, last, end; empty if they are `shards`."""
    whole: tuple[Round, ...] | None = field(default=None, repr=False)
    """All rounds, of a schedule that was written down as such."""

    @property
    def own_shards(self) -> list[tuple[int, int]]:
        """The shard of each rank."""
        if self.cuts:
            return list(pairwise(self.cuts))
        return shards(self.num_elements, self.world_size)

    def rounds_of(self, rank: int) -> Iterator[OwnRound]:
        """The rounds in which the rank sends or receives anything."""
        for number, transfers in self.of_rank(rank):
            own = [t for t in transfers if t.start != t.stop]
            if own:
                yield number, own

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """All transfers of all ranks, by source; empty rounds are left out. For small world sizes.

        Raises: ValueError if two ranks do not say the same of what goes between them.
        """
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
        """The numbers of a rank's inputs; empty if ranks have vectors."""
        if not self.inputs:
            return range(0)
        first = sum(map(len, self.inputs[:rank]))
        return range(first, first + len(self.inputs[rank]))

    def in_memory(self, t: Transfer) -> bool:
        """Whether a transfer is a read and a write of shared memory, instead of a message."""
        return t.source // self.ranks_per_memory == t.destination // self.ranks_per_memory

    def late(self) -> "Schedule":
        """What is left to do once the early rounds are done; to be priced, for it is not whole."""
        return replace(self, of_rank=self._late_of, early_rounds=0)

    def _late_of(self, rank: int) -> Iterator[OwnRound]:
        for number, transfers in self.rounds_of(rank):
            if number >= self.early_rounds:
                yield number - self.early_rounds, transfers

    def by_messages(self) -> "Schedule":
        """The rounds between memories alone."""
        return replace(self, of_rank=self._messages_of, ranks_per_memory=1)

    def _messages_of(self, rank: int) -> Iterator[OwnRound]:
        for number, transfers in self.rounds_of(rank):
            yield number, [t for t in transfers if not self.in_memory(t)]

    def transfers(self) -> Iterable[Transfer]:
        """The transfers of all rounds, one after the other."""
        return (transfer for round_ in self.rounds for transfer in round_)

    def elements_of_busiest_rank(self) -> int:
        """The most elements that one rank sends, or receives, in messages of the whole exchange."""
        most = 0
        for rank in range(self.world_size):
            sent = received = 0
            for _, transfers in self.by_messages().rounds_of(rank):
                sent += sum(t.stop - t.start for t in transfers if t.source == rank)
                received += sum(t.stop - t.start for t in transfers if t.destination == rank)
            most = max(most, sent, received)
        return most

    def serial_elements(self) -> int:
        """Elements through the busiest port, summed over rounds: what β multiplies.

        A port sends and receives at once (full duplex); rounds follow each other.
        """
        return self._serial[0]

    def serial_messages(self) -> int:
        """Messages through the busiest port, summed over rounds: what α multiplies."""
        return self._serial[1]

    def serial_additions(self) -> int:
        """Additions of the rank that adds most, summed over rounds: what γ multiplies."""
        return self._serial[2]

    @cached_property
    def _serial(self) -> tuple[int, int, int]:
        most: dict[int, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
        ranks = range(self.world_size) if self.busiest is None else self.busiest
        for rank in ranks:
            for number, transfers in self.rounds_of(rank):
                sent = [t for t in transfers if not self.in_memory(t)]
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
    """A schedule that is written down whole, without its empty transfers and empty rounds."""
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
    """Elements that the busiest rank of any all-reduce must send: 2 (p - 1) / p · n.

    Source: Patarasuk and Yuan 2009, theorem 1.
    """
    return 2 * (world_size - 1) / world_size * num_elements


def shard(num_elements: int, parts: int, index: int) -> tuple[int, int]:
    """One of `parts` slices that cover the vector one after the other, as equal as they can be."""
    return num_elements * index // parts, num_elements * (index + 1) // parts


def shards(num_elements: int, parts: int) -> list[tuple[int, int]]:
    """All slices of `shard`, in order."""
    return list(pairwise(equal_cuts(num_elements, parts)))


def equal_cuts(num_elements: int, parts: int, grain: int = 1) -> list[int]:
    """Where the slices of `shard` begin and, last, end. grain: they are of whole grains, but that
    the last grain may be shorter.
    """
    grains = -(-num_elements // grain)
    return [min(grains * i // parts * grain, num_elements) for i in range(parts + 1)]
