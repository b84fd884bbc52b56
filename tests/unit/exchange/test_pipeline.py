"""The segmented exchanges, with many segments: right sums, closed formulas, the shape of trees."""

from collections import Counter
from itertools import chain, pairwise, product
from math import ceil, log2

import pytest

from firecaffe.exchange import double_tree, pipelined_tree, tree
from firecaffe.exchange.double_tree import two_trees
from firecaffe.exchange.pieces import num_segments, overlay
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.schedule import OwnRound, Transfer
from tests.kit.exchange import WORLD_SIZES, add

SEGMENTED = {"pipelined_tree": pipelined_tree.schedule, "double_tree": double_tree.schedule}
SEGMENTS = ((0, 5), (1, 5), (2, 1), (5, 1), (64, 10), (1009, 37), (12345, 1000))
"""Elements of vectors, and of a segment."""


@pytest.mark.parametrize("algorithm", SEGMENTED)
def test_every_rank_ends_with_every_part_once(algorithm: str) -> None:
    for world_size, (num_elements, most) in product(WORLD_SIZES, SEGMENTS):
        schedule = SEGMENTED[algorithm](world_size, num_elements, segment_elements=most)
        check(schedule)
        assert (schedule.algorithm, schedule.world_size) == (algorithm, world_size)
        assert all(0 < t.num_elements <= most for t in schedule.transfers())
        slices = {(t.start, t.stop) for t in schedule.transfers()}
        if world_size > 1 and num_elements:
            assert len(slices) >= num_elements / most
            lengths = {stop - start for start, stop in slices}
            assert max(lengths) - min(lengths) <= 1
        proof = prove(schedule)
        assert proof.complete
        assert proof.in_tree_order or algorithm == "double_tree"
    with pytest.raises(ValueError, match="segment_elements is 0"):
        SEGMENTED[algorithm](4, 100, segment_elements=0)


def test_number_of_segments() -> None:
    assert [num_segments(n, 10) for n in (0, 1, 10, 11, 20, 21)] == [1, 1, 1, 2, 2, 3]


def test_overlay_by_hand() -> None:
    halves = [(0, 5), (5, 9)]
    (a1, a2), (b1, b2) = ([add(0, rank, *half) for half in halves] for rank in (1, 2))

    def laid(second: int, stride: int) -> list[tuple[int, set[Transfer]]]:
        own: list[OwnRound] = [(0, [add(0, 1, 0, 0)]), (second, [add(0, 2, 0, 0)])]
        return [(number, {*ts}) for number, ts in overlay(own, halves, stride=stride)]

    assert laid(second=1, stride=1) == [(0, {a1}), (1, {b1, a2}), (2, {b2})]
    assert laid(second=1, stride=2) == [(0, {a1}), (1, {b1}), (2, {a2}), (3, {b2})]
    assert laid(second=2, stride=2) == [(0, {a1}), (2, {b1, a2}), (4, {b2})]
    assert list(overlay([], halves, stride=1)) == []


def segments_of_pipelined_tree(p: int, s: int) -> int:
    """Segments through the root's port. It receives in rounds c to c + k - 1 for segment c, and
    sends in the k rounds after; of 2 k s messages, those that meet in a round count once.
    """
    k = ceil(log2(p))
    return 2 * k * s - sum(min(k, i, s - i) for i in range(1, s))


@pytest.mark.parametrize(("world_size", "s"), list(product(WORLD_SIZES, (1, 2, 3, 7, 20))))
def test_costs_of_a_pipelined_tree(world_size: int, s: int) -> None:
    k = ceil(log2(world_size))
    schedule = pipelined_tree.schedule(world_size, 6 * s, segment_elements=6)
    assert len(schedule.rounds) == (2 * k + s - 1 if world_size > 1 else 0)
    assert schedule.serial_messages() == segments_of_pipelined_tree(world_size, s)
    assert schedule.serial_elements() == 6 * segments_of_pipelined_tree(world_size, s)
    assert schedule.serial_additions() == k * 6 * s
    assert schedule.elements_of_busiest_rank() == k * 6 * s
    if s >= 2 * k:
        assert segments_of_pipelined_tree(world_size, s) == k * (s + k)


def test_one_segment_is_the_tree() -> None:
    for world_size in WORLD_SIZES:
        alone = pipelined_tree.schedule(world_size, 100, segment_elements=100)
        assert alone.rounds == tree.schedule(world_size, 100).rounds


@pytest.mark.parametrize(("world_size", "per_tree"), list(product(WORLD_SIZES, (1, 2, 3, 10))))
def test_costs_of_a_double_tree(world_size: int, per_tree: int) -> None:
    """Each tree sends up in s / 2 + levels - 1 rounds, and down in as many, two segments a port.

    At a power of two only one rank is on the lowest level, so that the first round and the last
    bring one; of two ranks each hears from one other alone.
    """
    p, s, levels = world_size, 2 * per_tree, int(log2(world_size))
    one_way = per_tree + levels - 1 if p > 1 else 0
    a_round = 1 if p == 2 else 2
    alone_below = p > 2 and p == 2**levels
    up = a_round * one_way - alone_below
    schedule = double_tree.schedule(p, 6 * s, segment_elements=6)
    assert len(schedule.rounds) == 2 * one_way
    assert schedule.serial_messages() == 2 * up
    assert schedule.serial_elements() == 6 * 2 * up
    assert schedule.serial_additions() == 6 * up


def test_a_double_tree_of_many_segments_takes_twice_the_vector() -> None:
    for world_size in [3, 4, 5, 31, 32, 64]:
        schedule = double_tree.schedule(world_size, 200, segment_elements=1)
        assert 2 <= schedule.serial_elements() / 200 <= 2 * (1 + 2 * log2(world_size) / 200)


def test_two_trees() -> None:
    """Each reaches all ranks from one root, is binary and low; no rank is inside both."""
    for world_size in range(1, 65):
        inside = []
        for levels in two_trees(world_size):
            assert len(levels) == int(log2(world_size))
            edges = list(chain.from_iterable(levels))
            children = [child for child, _ in edges]
            assert len(set(children)) == len(children) == world_size - 1
            [root] = set(range(world_size)) - set(children)
            above = {root}
            for level in levels:
                assert {parent for _, parent in level} <= above
                above = {child for child, _ in level}
            hears = Counter(parent for _, parent in edges)
            assert all(count <= 2 for count in hears.values())
            inside.append(set(hears))
        assert not inside[0] & inside[1]


def test_rounds_of_a_double_tree_go_one_way_and_fill_the_ports() -> None:
    for world_size in WORLD_SIZES[1:]:
        rounds = double_tree.schedule(world_size, 400, segment_elements=10).rounds
        for round_ in rounds:
            assert len({t.reduce for t in round_}) == 1
            for port in (Counter(t.source for t in round_), Counter(t.destination for t in round_)):
                assert max(port.values()) <= 2
        levels = int(log2(world_size))
        middle = rounds[3 * levels : -3 * levels]
        assert all(a[0].reduce != b[0].reduce for a, b in pairwise(middle))
        assert {len(round_) for round_ in middle} == {2 * (world_size - 1)}
