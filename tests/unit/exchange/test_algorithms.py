"""Every algorithm at every world size, in segments and over nodes: right sums, in tree order where
that is said, and the published number of everything.
"""

from collections import Counter
from fractions import Fraction
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

SEGMENTS = 22
"""So many segments of equal length are the fewest of 32768 elements at most, at every world size;
and twice the levels of the largest tree at least."""


def divisible(world_size: int) -> int:
    """Elements of which all shards, and all segments, are equal: 720720 = lcm(1, …, 16)."""
    return 720720 if world_size <= 16 else 32640 * 22  # 32640 = 16 * 17 * 120


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


Cost = tuple[int, int, Fraction | int, Fraction | int, Fraction | int]
"""For a vector of length 1: rounds, what α, β and γ multiply, and what passes the busiest rank."""


def costs(p: int) -> dict[str, Cost]:
    """Of p ranks. Source: Thakur, Rabenseifner, Gropp 2005; for servers and segments, by counting.

    With lg p rounded up to k, and down; q is the largest power of two among p ranks.
    """
    part, s, is_several = Fraction(p - 1, p), SEGMENTS, int(p > 1)
    k, low = ceil(log2(p)), int(log2(p))
    pairs = k - low  # before and after, where p is no power of two
    all_pairs = low + 2 * pairs
    of_q = Fraction(2**low - 1, 2**low)
    piped = k * (s + k)
    # On the lowest level of p = 2^k ranks there is one.
    double = {1: 0, 2: s}.get(p, 2 * s + 4 * (low - 1) - 2 * (1 - pairs))
    at_inner = {1: Fraction(0), 2: Fraction(1), 3: Fraction(3, 2), 4: Fraction(3, 2)}
    return {
        # 2 p (α + n β) + p n γ for p workers at one port; here the server is one of the p.
        "parameter_server": (2 * is_several, 2 * (p - 1), 2 * (p - 1), p - 1, p - 1),
        # 2 rounds of p - 1 messages, 2 (p - 1) / p n β.
        "sharded_parameter_server": (2 * is_several, 2 * (p - 1), 2 * part, part, 2 * part),
        # 2 lg p (α + n β) + lg p n γ.
        "tree": (2 * k, 2 * k, 2 * k, k, k),
        # k (s + k) (α + n / s β) + k n γ, if s is at least 2 k.
        "pipelined_tree": (is_several * (2 * k + s - 1), piped, Fraction(piped, s), k, k),
        # 2 n β and the filling; a rank inside one tree hears from two children and two parents.
        "double_tree": (
            is_several * (s + 2 * (low - 1)),
            double,
            Fraction(double, s),
            Fraction(double, 2 * s),
            at_inner.get(p, Fraction(2)),
        ),
        # 2 (p - 1) α + 2 (p - 1) / p n β + (p - 1) / p n γ.
        "ring": (2 * (p - 1), 2 * (p - 1), 2 * part, part, 2 * part),
        # lg p (α + n β + n γ); else the same for q ranks, and the pairs before and after. The rank
        # that takes in its pair's vector hears it, and returns the result.
        "recursive_doubling": (all_pairs, all_pairs, all_pairs, low + pairs, low + pairs),
        # 2 lg p α + 2 (p - 1) / p n β + (p - 1) / p n γ; else for q ranks, with α, n β, n γ for the
        # pairs before and α, n β after.
        "halving_doubling": (
            low + all_pairs,
            low + all_pairs,
            2 * of_q + 2 * pairs,
            of_q + pairs,
            2 * of_q + pairs,
        ),
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_costs_are_the_published_ones(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        elements = divisible(world_size)
        schedule = ALGORITHMS[algorithm](world_size, elements)
        rounds, messages, sent, added, through = costs(world_size)[algorithm]
        assert len(schedule.rounds) == rounds
        assert schedule.serial_messages() == messages
        assert schedule.serial_elements() == sent * elements
        assert schedule.serial_additions() == added * elements
        assert schedule.elements_of_busiest_rank() == through * elements


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
