"""Interprets a schedule in one process, and proves what it computes by running it on symbols.

Every rank, or every leaf of the inputs, starts with its symbol. A sum is an unordered pair of
earlier sums: IEEE addition commutes, so only the pairing decides the bits. `check` refuses a
schedule whose meaning would depend on timing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter
from typing import TypeVar

from firecaffe.exchange.collectives import block
from firecaffe.exchange.leaves import leaves_of, sum_of_nodes, tree_sum
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    VECTOR,
    Schedule,
    Transfer,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Proof:
    """The findings about a schedule, for every element that a rank must have in the end."""

    complete: bool
    """Whether each element holds every rank's contribution exactly once."""
    in_tree_order: bool
    """Whether each element is added up in the order of the fixed binary tree over ranks."""


class _Sums:  # equal sums have equal numbers, in whatever way they were reached
    def __init__(self, symbols: int) -> None:
        self.everybody = (1 << symbols) - 1
        self.ranks = [1 << symbol for symbol in range(symbols + 1)]
        self.nothing = symbols  # the number of a vector that holds nothing yet
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
    """Run the schedule symbolically, and compare its results with the sum of `tree_sum`."""
    symbols = schedule.num_leaves or schedule.world_size
    sums = _Sums(symbols)
    tree = tree_sum(range(symbols), sums.add)
    slices = len(schedule.ends) - 1
    first: Iterable[int] = range(symbols)
    if schedule.inputs:
        first = (tree_sum(leaves_of(node, symbols), sums.add) for node in chain(*schedule.inputs))
    vectors = [[value] * slices for value in first]
    held = outcome(schedule, vectors, [sums.nothing] * slices, sums.add)
    return _judge(schedule, held, sums, tree)


def outcome(
    schedule: Schedule,
    vectors: Sequence[Sequence[T]],
    nothing: Sequence[T],
    add: Callable[[T, T], T],
) -> list[list[T]]:
    """Return what each rank holds in the end, by slice between two of the schedule's ends.

    vectors: the slices of each rank's vector, or of each input. nothing: those of a vector that
    holds nothing yet. `add` is commutative, and changes neither of its arguments.
    """
    nodes = [*chain(*schedule.inputs)]
    if nodes and schedule.world_size == 1:
        whole = zip(*vectors, strict=True)
        return [[sum_of_nodes(nodes, values, schedule.num_leaves, add) for values in whole]]
    held = [list(nothing) for _ in schedule.inputs] or [list(vector) for vector in vectors]
    index_of = {end: index for index, end in enumerate(schedule.ends)}
    kept: dict[tuple[int, int], list[tuple[int, T]]] = defaultdict(list)
    for round_ in schedule.rounds:
        arriving: dict[tuple[int, int], list[tuple[int, T]]] = defaultdict(list)
        written: dict[tuple[int, int], T] = {}
        for t in round_:
            source = held[t.source] if t.reads == VECTOR else vectors[t.reads]
            for index in range(index_of[t.start], index_of[t.stop]):
                place = t.destination, index
                if not t.reduce:
                    written[place] = source[index]
                elif t.reads == VECTOR:
                    arriving[place].append((t.source, source[index]))
                else:
                    kept[place].append((t.reads, source[index]))
        for (rank, index), parts in arriving.items():
            _, values = _in_order([*parts, (rank, held[rank][index])])
            written[rank, index] = tree_sum(values, add)
        for (rank, index), parts in list(kept.items()):
            own = schedule.own_inputs(rank)
            if len(parts) + len(own) >= len(nodes):
                del kept[rank, index]
                all_parts = [*parts, *((number, vectors[number][index]) for number in own)]
                numbers, values = _in_order(all_parts)
                # The tree needs every node exactly once.
                written[rank, index] = nothing[index]
                if numbers == [*range(len(nodes))]:
                    written[rank, index] = sum_of_nodes(nodes, values, schedule.num_leaves, add)
        for (rank, index), value in written.items():
            held[rank][index] = value
    return held


def _in_order(parts: Sequence[tuple[int, T]]) -> tuple[list[int], list[T]]:
    in_order = sorted(parts, key=itemgetter(0))
    return [number for number, _ in in_order], [value for _, value in in_order]


def _judge(schedule: Schedule, held: list[list[int]], sums: _Sums, tree: int) -> Proof:
    # Compare what each rank must have in the end, by kind, with what it holds.
    p, cuts = schedule.world_size, schedule.ends
    owners = [
        owner
        for owner, (start, stop) in enumerate(schedule.own_shards)
        for cut in cuts[:-1]
        if start <= cut < stop
    ]
    if schedule.kind in (ALL_GATHER, BROADCAST):
        first = [0] * len(owners) if schedule.kind == BROADCAST else owners
        is_right = all(row == first for row in held)
        return Proof(is_right, is_right)
    if schedule.kind == ALL_TO_ALL:
        is_right = all(
            held[rank][cuts.index(start)] == source
            for rank in range(p)
            for source in range(p)
            for start, stop in [block(schedule.num_elements, p, source, rank)]
            if start != stop
        )
        return Proof(is_right, is_right)
    is_whole = schedule.kind != REDUCE_SCATTER
    results = [
        value
        for rank, row in enumerate(held)
        for owner, value in zip(owners, row, strict=True)
        if is_whole or owner == rank
    ]
    return Proof(
        complete=sums.all_exact and all(sums.ranks[result] == sums.everybody for result in results),
        in_tree_order=all(value == tree for value in results),
    )


def check(schedule: Schedule) -> None:
    """Check all rounds of all ranks. Raises: ValueError, as `check_round`."""
    for index, round_ in enumerate(schedule.rounds):
        check_round(index, round_, schedule)


def check_round(number: int, transfers: Sequence[Transfer], schedule: Schedule) -> None:
    """Check all transfers of a round, or those of one rank: no rule concerns several ranks.

    Raises: ValueError if a transfer leaves the ranks or the vector, if two transfers write
    overlapping slices (other than additions to the same slice), if a rank sends a slice that the
    round overwrites, if inputs and vectors are added together, or if a rank sends one rank two
    messages from the same input or vector, which the receiver could not tell apart.
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
