"""Every algorithm at every world size: right sums, and the published number of everything."""

from fractions import Fraction
from itertools import product
from math import ceil, log2

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import lower_bound_elements
from tests.kit.exchange import WORLD_SIZES, add

SIZES = (0, 1, 64, 1009, 12345)
SEGMENTS = 22
"""So many segments of equal length are the fewest of 32768 elements at most, at every world size;
and twice the levels of the largest tree at least."""


def divisible(world_size: int) -> int:
    """Elements of which all shards, and all segments, are equal: 720720 = lcm(1, …, 16)."""
    return 720720 if world_size <= 16 else 32640 * 22  # 32640 = 16 * 17 * 120


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_ends_with_every_part_once(algorithm: str) -> None:
    """And added in the tree's order where that is said: for the vectors of a real run, too."""
    for world_size, num_elements in product(WORLD_SIZES, SIZES):
        schedule = ALGORITHMS[algorithm](world_size, num_elements)
        check(schedule)
        assert (schedule.algorithm, schedule.world_size) == (algorithm, world_size)
        assert schedule.num_elements == num_elements
        assert all(schedule.rounds)
        assert all(t.num_elements > 0 for t in schedule.transfers())
        assert schedule.rounds or world_size == 1 or num_elements == 0
        proof = prove(schedule)
        assert proof.complete
        if num_elements >= world_size:
            assert proof.in_tree_order == adds_in_tree_order(algorithm, world_size)
        again = ALGORITHMS[algorithm](world_size, num_elements)
        assert (again, again.rounds) == (schedule, schedule.rounds)
    for num_elements in SIZES:
        assert ALGORITHMS[algorithm](1, num_elements).rounds == ()
    assert ALGORITHMS[algorithm](9, 0).rounds == ()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_order_is_what_the_proof_finds(algorithm: str) -> None:
    for world_size in (*range(18, 34), 48, 60, 64):
        proof = prove(ALGORITHMS[algorithm](world_size, 4 * world_size))
        assert (proof.complete, proof.in_tree_order) == (
            True,
            adds_in_tree_order(algorithm, world_size),
        )


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


def test_the_tables_have_the_same_rows() -> None:
    assert costs(2).keys() == ALGORITHMS.keys()
    assert (*ALGORITHMS, NATIVE) == EXCHANGES


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_costs_are_the_published_ones(algorithm: str) -> None:
    """No busiest rank beats the lower bound, and some algorithms reach it."""
    reached = set()
    for world_size in WORLD_SIZES:
        elements = divisible(world_size)
        schedule = ALGORITHMS[algorithm](world_size, elements)
        rounds, messages, sent, added, through = costs(world_size)[algorithm]
        assert len(schedule.rounds) == rounds
        assert schedule.serial_messages() == messages
        assert schedule.serial_elements() == sent * elements
        assert schedule.serial_additions() == added * elements
        busiest = schedule.elements_of_busiest_rank()
        assert busiest == through * elements
        bound = lower_bound_elements(world_size, elements)
        assert busiest >= bound - 0.5
        if busiest <= bound + 0.5:
            reached.add(world_size)
    assert reached == AT_THE_BOUND[algorithm]


AT_THE_BOUND = {
    "parameter_server": {1, 2},
    "sharded_parameter_server": set(WORLD_SIZES),
    "tree": {1, 2},
    "pipelined_tree": {1, 2},
    "double_tree": {1, 2, 4},
    "ring": set(WORLD_SIZES),
    "recursive_doubling": {1, 2},
    "halving_doubling": {1, 2, 4, 8, 16},
}


def test_tree_has_binomial_edges() -> None:
    """Rank r hears from r + 2^k for the bits k below its lowest set bit, and answers."""
    for world_size in WORLD_SIZES:
        transfers = list(ALGORITHMS["tree"](world_size, 8).transfers())
        up = {(t.source, t.destination) for t in transfers if t.reduce}
        assert up == {(rank, rank & (rank - 1)) for rank in range(1, world_size)}
        assert {(t.destination, t.source) for t in transfers if not t.reduce} == up
        assert len(transfers) == 2 * (world_size - 1)


def test_ring_sends_only_to_the_right() -> None:
    for world_size in WORLD_SIZES[1:]:
        for round_ in ALGORITHMS["ring"](world_size, divisible(world_size)).rounds:
            assert [t.destination for t in round_] == [(t.source + 1) % world_size for t in round_]
            assert len({(t.start, t.stop) for t in round_}) == world_size


@pytest.mark.parametrize("algorithm", ["recursive_doubling", "halving_doubling"])
def test_doubling_swaps_at_distances_1_2_4(algorithm: str) -> None:
    for world_size in [2, 4, 8, 16]:
        levels = int(log2(world_size))
        distances = [1 << level for level in range(levels)]
        if algorithm == "halving_doubling":
            distances += reversed(distances)
        rounds = ALGORITHMS[algorithm](world_size, 1024).rounds
        assert [{t.source ^ t.destination for t in round_} for round_ in rounds] == [
            {distance} for distance in distances
        ]


def test_a_round_of_halving_doubling_by_hand() -> None:
    first, second, *_ = ALGORITHMS["halving_doubling"](4, 8).rounds
    assert first == (add(0, 1, 4, 8), add(1, 0, 0, 4), add(2, 3, 4, 8), add(3, 2, 0, 4))
    assert second == (add(0, 2, 2, 4), add(1, 3, 6, 8), add(2, 0, 0, 2), add(3, 1, 4, 6))
