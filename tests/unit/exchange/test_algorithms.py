"""Every algorithm at every world size, in segments and over nodes: right sums, in tree order where
that is said. Costs are those of the page in tests/habits/test_formulas.py; here, of many segments.
"""

from collections import Counter
from itertools import product
from math import ceil, log2

import pytest

from firecaffe.exchange import (
    ALGORITHMS,
    EXCHANGES,
    NATIVE,
    ROOTED,
    double_tree,
    find_schedule,
    pipelined_tree,
)
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.route import adds_in_tree_order, keeps_tree_order
from firecaffe.exchange.schedule import Schedule
from tests.kit.exchange import WORLD_SIZES


def in_tree_order(schedule: Schedule, name: str, world_size: int, num_elements: int) -> bool:
    """Of a schedule that is allowed and complete, and sends where there is something to send."""
    check(schedule)
    assert (schedule.algorithm, schedule.world_size) == (name, world_size)
    assert schedule.num_elements == num_elements
    assert bool(schedule.rounds) == (world_size > 1 and num_elements > 0)
    assert all(schedule.rounds)
    assert all(t.num_elements > 0 for t in schedule.transfers())
    proof = prove(schedule)
    assert proof.complete
    return proof.in_tree_order


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_ends_with_every_part_once(algorithm: str) -> None:
    """And added in the tree's order where that is said: for the vectors of a real run, too."""
    sizes = [*product(WORLD_SIZES, (0, 1, 64, 1009, 12345))]
    sizes += [(p, 4 * p) for p in (*range(18, 34), 48, 60, 64)]
    for world_size, num_elements in sizes:
        schedule = ALGORITHMS[algorithm](world_size, num_elements)
        in_order = in_tree_order(schedule, algorithm, world_size, num_elements)
        if num_elements >= world_size:
            assert in_order == adds_in_tree_order(algorithm, world_size)


def test_who_is_made_for_tree_order() -> None:
    """Whoever keeps it at four ranks; a library promises none, but two numbers have one sum."""
    kept = [name for name in EXCHANGES if keeps_tree_order(name)]
    assert kept == [name for name in EXCHANGES if name not in ("ring", "double_tree", NATIVE)]
    assert [p for p in range(1, 9) if adds_in_tree_order(NATIVE, p)] == [1, 2]


SEGMENTED = {"pipelined_tree": pipelined_tree.schedule, "double_tree": double_tree.schedule}


@pytest.mark.parametrize("algorithm", SEGMENTED)
def test_segments_have_their_length_at_most_and_all_nearly_the_same(algorithm: str) -> None:
    sizes = (0, 5), (1, 5), (2, 1), (5, 1), (64, 10), (1009, 37), (12345, 1000)
    for world_size, (num_elements, most) in product(WORLD_SIZES, sizes):
        schedule = SEGMENTED[algorithm](world_size, num_elements, segment_elements=most)
        in_order = in_tree_order(schedule, algorithm, world_size, num_elements)
        assert in_order or algorithm == "double_tree"
        lengths = {t.num_elements for t in schedule.transfers()} or {0}
        assert max(lengths) <= most
        assert max(lengths) - min(lengths) <= 1
    with pytest.raises(ValueError, match="segment_elements is 0"):
        SEGMENTED[algorithm](4, 100, segment_elements=0)


def test_costs_of_a_pipelined_tree() -> None:
    """The root receives in rounds c to c + k - 1 for segment c, and sends in the k rounds after; of
    2 k s messages, those that meet in a round count once.
    """
    for p, s in product(WORLD_SIZES, (1, 2, 3, 7, 20)):
        k = ceil(log2(p))
        messages = 2 * k * s - sum(min(k, i, s - i) for i in range(1, s))
        schedule = pipelined_tree.schedule(p, 6 * s, segment_elements=6)
        assert len(schedule.rounds) == (2 * k + s - 1 if p > 1 else 0)
        assert (schedule.serial_messages(), schedule.serial_elements()) == (messages, 6 * messages)
        assert schedule.serial_additions() == schedule.elements_of_busiest_rank() == 6 * k * s


def test_costs_of_a_double_tree() -> None:
    """Each tree sends up in s / 2 + levels - 1 rounds, and down in as many, two segments a port: no
    rank is inside both.

    At a power of two only one rank is on the lowest level, so that the first round and the last
    bring one; of two ranks each hears from one other alone.
    """
    for p, per_tree in product((*WORLD_SIZES, 31, 32, 33, 64), (1, 2, 3, 10)):
        levels = int(log2(p))
        one_way = per_tree + levels - 1 if p > 1 else 0
        up = (1 if p == 2 else 2) * one_way - (p > 2 and p == 2**levels)
        schedule = double_tree.schedule(p, 12 * per_tree, segment_elements=6)
        assert len(schedule.rounds) == 2 * one_way
        assert schedule.serial_messages() == 2 * up
        assert schedule.serial_elements() == 6 * 2 * up
        assert schedule.serial_additions() == 6 * up
        for half, of_levels in enumerate(double_tree.two_trees(p)):
            edges = [edge for level in of_levels for edge in level]
            added = [
                t for t in schedule.transfers() if t.reduce and t.start // (6 * per_tree) == half
            ]
            assert {(t.source, t.destination) for t in added} == {*edges}
            assert len(edges) == p - 1


NODES = [(p, m) for p in range(1, 18) for m in range(1, p + 1) if p % m == 0]
PAIRS = list(product(ROOTED, ALGORITHMS))
NUMBERS = (
    lambda schedule: len(schedule.rounds),
    Schedule.serial_messages,
    Schedule.serial_elements,
    Schedule.serial_additions,
    Schedule.elements_of_busiest_rank,
)


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_over_nodes_it_is_inner_and_outer(inner: str, outer: str) -> None:
    """A node of m ranks is a node of the tree if m is a power of two; else the tree cuts nodes, for
    its left side is a power of two of ranks. First ranks alone speak across nodes, as outer does.
    """
    name = f"hierarchical({inner},{outer})"
    assert keeps_tree_order(name) == keeps_tree_order(outer)
    for (world_size, m), num_elements in product(NODES, (0, 1, 1009)):
        nodes = world_size // m
        whole = find_schedule(name, ranks_per_node=m)(world_size, num_elements)
        in_order = in_tree_order(whole, name, world_size, num_elements)
        if num_elements == 1009:
            assert in_order == adds_in_tree_order(name, world_size, m)
            assert in_order == (
                nodes == 1 or (m & (m - 1) == 0 and adds_in_tree_order(outer, nodes))
            )
        across = [t for t in whole.transfers() if t.source // m != t.destination // m]
        assert all(t.source % m == t.destination % m == 0 for t in across)
        of_nodes = Counter((t.source // m, t.destination // m, *t[2:5]) for t in across)
        assert of_nodes == Counter(
            t[:5] for t in ALGORITHMS[outer](nodes, num_elements).transfers()
        )


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_costs_over_nodes_are_those_of_inner_and_outer(inner: str, outer: str) -> None:
    for world_size, m in NODES:
        num_elements = 12 * world_size
        schedule = find_schedule(f"hierarchical({inner},{outer})", m)(world_size, num_elements)
        within, across = ALGORITHMS[inner], ALGORITHMS[outer]
        parts = within(m, num_elements), across(world_size // m, num_elements)
        for number in NUMBERS:
            assert number(schedule) == sum(map(number, parts))


@pytest.mark.parametrize(("world_size", "m"), [(7, 2), (2, 4), (9, 6)])
def test_nodes_must_be_whole(world_size: int, m: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} ranks do not fill nodes of {m}"):
        find_schedule("hierarchical(tree,ring)", m)(world_size, 100)


REFUSED = {
    "rign": f"no exchange 'rign'; the exchanges are {', '.join(EXCHANGES)}, hierarchical",
    "": "no exchange ''",
    NATIVE: "native is .* has no schedule",
    "hierarchical": "no exchange 'hierarchical'",
    "hierarchical(tree)": "no exchange",
    "hierarchical(tree, ring)": "no exchange",
    "hierarchical(tree,ring)x": "no exchange",
    "hierarchical(ring,tree)": "inner is 'ring'; it must be one of parameter_server, tree$",
    "hierarchical(pipelined_tree,tree)": "inner is 'pipelined_tree'",
    "hierarchical(tree,rign)": "outer is 'rign'",
    "hierarchical(tree,native)": "outer is 'native'",
}


def test_unknown_names_are_refused() -> None:
    for name, message in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            find_schedule(name, 2)
    for name in ("tree", "hierarchical(tree,ring)"):
        with pytest.raises(ValueError, match="ranks_per_node is 0"):
            find_schedule(name, 0)
    assert find_schedule("ring", 3) is ALGORITHMS["ring"]
