"""Prices exchanges among very many ranks by classes of equal rounds, as arrays over all ranks.

A ring of a thousand ranks has two million transfers, but all its rounds are equal. A test compares
the times with those of whole schedules at small numbers of ranks.

`rounds_s` runs rounds in sequence, each as long as its busiest port: the model of Thakur,
Rabenseifner and Gropp 2005. Unlike `planner.simulate`, it has no overlap of pieces.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firecaffe.exchange import double_tree, parse_hierarchical
from firecaffe.exchange.pipelined_tree import SEGMENT_ELEMENTS, num_segments
from firecaffe.exchange.power_of_two import active_ranks, largest_power_of_two
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT, Schedule
from firecaffe.planner.simulate import Network

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class EqualRounds:
    """`count` equal rounds: which rank sends how many elements to which rank."""

    count: int
    source: Ranks
    destination: Ranks
    elements: Ranks
    reduce: NDArray[np.bool_]
    """Whether each message is added to the receiver's elements."""


def rounds_of(schedule: Schedule) -> Iterator[EqualRounds]:
    for round_ in schedule.rounds:
        rows = [(t.source, t.destination, t.num_elements, t.reduce) for t in round_]
        source, destination, elements, reduce = np.array(rows, dtype=np.int64).T
        yield EqualRounds(1, source, destination, elements, reduce.astype(bool))


def equal_rounds(
    algorithm: str, world_size: int, num_elements: int, ranks_per_node: int = 1
) -> Iterator[EqualRounds]:
    """Rounds of an algorithm of `exchange.ALGORITHMS`, or of hierarchical(INNER,OUTER)."""
    if world_size == 1 or num_elements == 0:
        return
    nested = parse_hierarchical(algorithm)
    if nested is None:
        yield from ROUNDS[algorithm](world_size, num_elements)
        return
    inner, outer = nested
    first = np.arange(0, world_size, ranks_per_node)
    inside = list(equal_rounds(inner, ranks_per_node, num_elements))
    in_all = [_shifted(equal_round, first) for equal_round in inside]
    yield from (equal_round for equal_round in in_all if equal_round.reduce.all())
    for equal_round in equal_rounds(outer, len(first), num_elements):
        ends = first[equal_round.source], first[equal_round.destination]
        yield EqualRounds(equal_round.count, *ends, equal_round.elements, equal_round.reduce)
    yield from (equal_round for equal_round in in_all if not equal_round.reduce.any())


def rounds_s(rounds: Iterator[EqualRounds], network: Network) -> float:
    return whole_and_latency_s(rounds, network)[0]


def whole_and_latency_s(rounds: Iterator[EqualRounds], network: Network) -> tuple[float, float]:
    """Seconds of the rounds, and of the same rounds with empty messages."""
    whole_s = latency_s = 0.0
    for equal_round in rounds:
        once_s, empty_s = _round_s(equal_round, network)
        whole_s += equal_round.count * once_s
        latency_s += equal_round.count * empty_s
    return whole_s, latency_s


def sharded_s(
    network: Network, num_elements: int, bytes_per_element: int = BYTES_PER_ELEMENT
) -> float:
    """Seconds of the sharded server's rounds by a formula; exact if the ranks fill whole groups."""
    world_size = network.world_size
    shard_bytes = -(-num_elements // world_size) * bytes_per_element
    longest_s = adds_s = 0.0
    for link, inner in zip(network.links, network.inner, strict=True):
        group = min(inner, world_size)
        peers = min(link.group or world_size, world_size) - group
        messages = -(-group // link.ports) * peers
        each_s = link.latency_s + shard_bytes / link.bandwidth_bytes_per_s
        longest_s = max(longest_s, messages * each_s)
        adds_s += link.addition_s_per_byte * shard_bytes * peers
    return 2 * longest_s + adds_s


def _round_s(round_: EqualRounds, network: Network) -> tuple[float, float]:
    source, destination = round_.source, round_.destination
    if not len(source):
        return 0.0, 0.0
    sent_bytes = round_.elements * BYTES_PER_ELEMENT
    longest_s, latency_s, adds_s = 0.0, 0.0, np.zeros(len(source))
    is_open = np.ones(len(source), dtype=bool)
    senders = np.bincount(destination, 1 / np.bincount(source)[source])
    for link, inner in zip(network.links, network.inner, strict=True):
        meets = (
            is_open
            if not link.group
            else is_open & (source // link.group == destination // link.group)
        )
        if meets.any():
            a, b = source[meets], destination[meets]
            taken_bytes = sent_bytes[meets].astype(float)
            if link.congestion:
                # `simulate.crowding`, vectorized.
                taken_bytes *= 1 + link.congestion * (np.log2(np.maximum(1.0, senders[b]) + 1) - 1)
            busy_s = link.latency_s + taken_bytes / link.bandwidth_bytes_per_s
            empty_s = np.full(len(a), link.latency_s)
            added_bytes = sent_bytes[meets] * round_.reduce[meets]
            adds_s[meets] = added_bytes * link.addition_s_per_byte
            for end in (a, b):
                port = end // inner * link.ports + end % inner % link.ports
                longest_s = max(longest_s, np.bincount(port, busy_s).max())
                latency_s = max(latency_s, np.bincount(port, empty_s).max())
        is_open = is_open & ~meets
    return float(longest_s + np.bincount(destination, adds_s).max()), float(latency_s)


def _shifted(round_: EqualRounds, starts: Ranks) -> EqualRounds:
    return EqualRounds(
        round_.count,
        (starts[:, None] + round_.source).ravel(),
        (starts[:, None] + round_.destination).ravel(),
        np.tile(round_.elements, len(starts)),
        np.tile(round_.reduce, len(starts)),
    )


def _same(
    count: int, source: Ranks, destination: Ranks, elements: int, reduce: bool
) -> EqualRounds:
    size = len(source)
    return EqualRounds(count, source, destination, np.full(size, elements), np.full(size, reduce))


def _parameter_server(p: int, n: int) -> Iterator[EqualRounds]:
    others, root = np.arange(1, p), np.zeros(p - 1, dtype=np.int64)
    yield _same(1, others, root, n, True)
    yield _same(1, root, others, n, False)


def _sharded_parameter_server(p: int, n: int) -> Iterator[EqualRounds]:
    source, destination = (index.ravel() for index in np.indices((p, p)))
    apart = source != destination
    source, destination = source[apart], destination[apart]
    cuts = n * np.arange(p + 1) // p
    length = np.diff(cuts)
    reduce = np.ones(len(source), dtype=bool)
    yield EqualRounds(1, source, destination, length[destination], reduce)
    yield EqualRounds(1, source, destination, length[source], ~reduce)


def _tree_pairs(p: int) -> list[tuple[Ranks, Ranks]]:
    distances = [1 << k for k in range((p - 1).bit_length())]
    parents = [np.arange(0, p - d, 2 * d) for d in distances]
    return [(j + d, j) for j, d in zip(parents, distances, strict=True)]


def _tree(p: int, n: int) -> Iterator[EqualRounds]:
    pairs = _tree_pairs(p)
    yield from (_same(1, child, parent, n, True) for child, parent in pairs)
    yield from (_same(1, parent, child, n, False) for child, parent in reversed(pairs))


def _pipelined_tree(p: int, n: int) -> Iterator[EqualRounds]:
    pairs = _tree_pairs(p)
    there_and_back = [*pairs, *((parent, child) for child, parent in reversed(pairs))]
    segments = num_segments(n, SEGMENT_ELEMENTS)
    yield from _overlaid([there_and_back], -(-n // segments), segments, stride=1)


def _double_tree(p: int, n: int) -> Iterator[EqualRounds]:
    per_tree = num_segments(n, 2 * SEGMENT_ELEMENTS)
    trees = []
    for levels in double_tree.two_trees(p):
        pairs = [np.array(level, dtype=np.int64).T for level in levels if level]
        up = [(pair[0], pair[1]) for pair in reversed(pairs)]
        back = [(pair[1], pair[0]) for pair in pairs]
        none = np.zeros(0, dtype=np.int64)
        spaced = [part for ends in (*up, *back) for part in (ends, (none, none))][:-1]
        # The way up uses every second round from the first, and the way down the rounds between.
        half = 2 * len(up) - 1
        trees.append([*spaced[:half], *spaced[half + 1 :]])
    yield from _overlaid(trees, -(-n // (2 * per_tree)), per_tree, stride=2)


def _overlaid(
    trees: Sequence[Sequence[tuple[Ranks, Ranks]]], length: int, segments: int, stride: int
) -> Iterator[EqualRounds]:
    """Run round r of segment c in round r + c · stride, and merge rounds with the same parts."""
    rounds = len(trees[0])
    like: Counter[tuple[int, ...]] = Counter()
    for number in range(rounds + (segments - 1) * stride):
        least = max(0, -(-(number - rounds + 1) // stride))
        most = min(segments - 1, number // stride)
        like[tuple(number - c * stride for c in range(least, most + 1))] += 1
    for active, count in like.items():
        yield _union(trees, active, length, count)


def _union(
    trees: Sequence[Sequence[tuple[Ranks, Ranks]]], active: Sequence[int], length: int, count: int
) -> EqualRounds:
    parts = [tree[index] for tree in trees for index in active]
    source = np.concatenate([part[0] for part in parts])
    destination = np.concatenate([part[1] for part in parts])
    # The first half of a tree's rounds goes up.
    goes_up = [2 * index < len(tree) for tree in trees for index in active]
    reduce = np.repeat(goes_up, [len(part[0]) for part in parts])
    return EqualRounds(count, source, destination, np.full(len(source), length), reduce)


def _ring(p: int, n: int) -> Iterator[EqualRounds]:
    source = np.arange(p)
    for reduce in (True, False):
        yield _same(p - 1, source, (source + 1) % p, -(-n // p), reduce)


def _paired(p: int, n: int, rounds: Sequence[tuple[int, int, bool]]) -> Iterator[EqualRounds]:
    """Rounds (distance, elements, reduce) among 2^k ranks; other ranks before and after."""
    extra = p - largest_power_of_two(p)
    even, odd = 2 * np.arange(extra), 2 * np.arange(extra) + 1
    active = np.array(active_ranks(p))
    index = np.arange(len(active))
    if extra:
        yield _same(1, odd, even, n, True)
    for distance, elements, reduce in rounds:
        yield _same(1, active, active[index ^ distance], elements, reduce)
    if extra:
        yield _same(1, even, odd, n, False)


def _recursive_doubling(p: int, n: int) -> Iterator[EqualRounds]:
    levels = largest_power_of_two(p).bit_length() - 1
    yield from _paired(p, n, [(1 << k, n, True) for k in range(levels)])


def _halving_doubling(p: int, n: int) -> Iterator[EqualRounds]:
    levels = largest_power_of_two(p).bit_length() - 1
    down = [(1 << k, -(-n // (2 << k)), True) for k in range(levels)]
    up = [(distance, elements, False) for distance, elements, _ in reversed(down)]
    yield from _paired(p, n, [*down, *up])


ROUNDS: dict[str, Callable[[int, int], Iterator[EqualRounds]]] = {
    "parameter_server": _parameter_server,
    "sharded_parameter_server": _sharded_parameter_server,
    "tree": _tree,
    "pipelined_tree": _pipelined_tree,
    "double_tree": _double_tree,
    "ring": _ring,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
}
