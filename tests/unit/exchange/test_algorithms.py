"""Every algorithm at every world size: right sums, and the published number of everything."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, log2

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.schedule import Transfer, lower_bound_elements

WORLD_SIZES = range(1, 18)
SIZES = (0, 1, 64, 1009, 12345)
SEGMENTS = 22
"""So many segments of equal length are the fewest of 32768 elements at most, at every world size;
and twice the levels of the largest tree at least."""


def divisible(world_size: int) -> int:
    """Elements of which all shards, and all segments, are equal: 720720 = lcm(1, …, 16)."""
    return 720720 if world_size <= 16 else 32640 * 22  # 32640 = 16 * 17 * 120


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_ends_with_every_part_once(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        for num_elements in SIZES:
            schedule = ALGORITHMS[algorithm](world_size, num_elements)
            check(schedule)
            assert (schedule.algorithm, schedule.world_size) == (algorithm, world_size)
            assert schedule.num_elements == num_elements
            assert all(schedule.rounds)
            assert all(t.num_elements > 0 for t in schedule.transfers())
            assert prove(schedule).complete
            again = ALGORITHMS[algorithm](world_size, num_elements)
            assert (again, again.rounds) == (schedule, schedule.rounds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_is_sent_where_there_is_nothing_to_send(algorithm: str) -> None:
    assert ALGORITHMS[algorithm](1, 1000).rounds == ()
    assert ALGORITHMS[algorithm](9, 0).rounds == ()


@dataclass(frozen=True)
class Cost:
    """For p ranks and a vector of length 1: what α, β and γ multiply, and the busiest rank."""

    rounds: int
    messages: int
    elements: Fraction
    additions: Fraction
    busiest_rank: Fraction


def parameter_server(p: int) -> Cost:
    """2 p (α + n β) + p n γ for p workers at one port; here the server is one of the p."""
    k = p - 1
    return Cost(2 * (p > 1), 2 * k, Fraction(2 * k), Fraction(k), Fraction(k))


def sharded_parameter_server(p: int) -> Cost:
    """2 rounds of p - 1 messages, 2 (p - 1) / p n β."""
    part = Fraction(p - 1, p)
    return Cost(2 * (p > 1), 2 * (p - 1), 2 * part, part, 2 * part)


def tree(p: int) -> Cost:
    """2 lg p (α + n β) + lg p n γ, with lg p rounded up."""
    levels = ceil(log2(p))
    return Cost(2 * levels, 2 * levels, Fraction(2 * levels), Fraction(levels), Fraction(levels))


def pipelined_tree(p: int) -> Cost:
    """With k = lg p rounded up: k (s + k) (α + n / s β) + k n γ, if s is at least 2 k."""
    levels, s = ceil(log2(p)), SEGMENTS
    segments = levels * (s + levels)
    return Cost(
        2 * levels + s - 1 if p > 1 else 0,
        segments,
        Fraction(segments, s),
        Fraction(levels),
        Fraction(levels),
    )


def double_tree(p: int) -> Cost:
    """2 n β and the filling; a rank inside one tree hears from two children and two parents."""
    levels, s = int(log2(p)), SEGMENTS
    lone = log2(p) % 1 == 0  # on the lowest level there is one rank
    segments = {1: 0, 2: s}.get(p, 2 * s + 4 * (levels - 1) - 2 * lone)
    return Cost(
        s + 2 * (levels - 1) if p > 1 else 0,
        segments,
        Fraction(segments, s),
        Fraction(segments, 2 * s),
        {1: Fraction(0), 2: Fraction(1), 3: Fraction(3, 2), 4: Fraction(3, 2)}.get(p, Fraction(2)),
    )


def ring(p: int) -> Cost:
    """2 (p - 1) α + 2 (p - 1) / p n β + (p - 1) / p n γ."""
    part = Fraction(p - 1, p)
    return Cost(2 * (p - 1), 2 * (p - 1), 2 * part, part, 2 * part)


def recursive_doubling(p: int) -> Cost:
    """lg p (α + n β + n γ); else the same for q ranks, and the pairs before and after."""
    levels, extra = int(log2(p)), int(log2(p) % 1 > 0)
    rounds = levels + 2 * extra
    # The rank that takes in its pair's vector hears it, and returns the result.
    busiest = Fraction(levels + extra)
    return Cost(rounds, rounds, Fraction(rounds), busiest, busiest)


def halving_doubling(p: int) -> Cost:
    """2 lg p α + 2 (p - 1) / p n β + (p - 1) / p n γ; else for q ranks, with α, n β, n γ for the
    pairs before and α, n β after.
    """
    levels, extra = int(log2(p)), int(log2(p) % 1 > 0)
    q = 2**levels
    part = Fraction(q - 1, q)
    rounds = 2 * levels + 2 * extra
    return Cost(rounds, rounds, 2 * part + 2 * extra, part + extra, 2 * part + extra)


# Source: Thakur, Rabenseifner, Gropp 2005; for servers and segments, by counting.
COSTS: dict[str, Callable[[int], Cost]] = {
    "parameter_server": parameter_server,
    "sharded_parameter_server": sharded_parameter_server,
    "tree": tree,
    "pipelined_tree": pipelined_tree,
    "double_tree": double_tree,
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
}


def test_the_tables_have_the_same_rows() -> None:
    assert COSTS.keys() == ALGORITHMS.keys()
    assert (*ALGORITHMS, NATIVE) == EXCHANGES


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_costs_are_the_published_ones(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        elements = divisible(world_size)
        schedule = ALGORITHMS[algorithm](world_size, elements)
        cost = COSTS[algorithm](world_size)
        assert len(schedule.rounds) == cost.rounds
        assert schedule.serial_messages() == cost.messages
        assert schedule.serial_elements() == cost.elements * elements
        assert schedule.serial_additions() == cost.additions * elements
        assert schedule.elements_of_busiest_rank() == cost.busiest_rank * elements


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_algorithm_beats_the_lower_bound_and_some_reach_it(algorithm: str) -> None:
    reached = set()
    for world_size in WORLD_SIZES:
        elements = divisible(world_size)
        bound = lower_bound_elements(world_size, elements)
        busiest = ALGORITHMS[algorithm](world_size, elements).elements_of_busiest_rank()
        assert busiest >= bound - 0.5
        if busiest <= bound + 0.5:
            reached.add(world_size)
    assert reached == AT_THE_BOUND[algorithm]


def test_tree_has_binomial_edges() -> None:
    """Rank r hears from r + 2^k for the bits k below its lowest set bit, and answers."""
    for world_size in WORLD_SIZES:
        transfers = list(ALGORITHMS["tree"](world_size, 8).transfers())
        up = {(t.source, t.destination) for t in transfers if t.reduce}
        parents = {
            rank: rank & (rank - 1) for rank in range(1, world_size)
        }  # lowest set bit cleared
        assert up == set(parents.items())
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
    assert first == (
        Transfer(0, 1, 4, 8, reduce=True),
        Transfer(1, 0, 0, 4, reduce=True),
        Transfer(2, 3, 4, 8, reduce=True),
        Transfer(3, 2, 0, 4, reduce=True),
    )
    assert second == (
        Transfer(0, 2, 2, 4, reduce=True),
        Transfer(1, 3, 6, 8, reduce=True),
        Transfer(2, 0, 0, 2, reduce=True),
        Transfer(3, 1, 4, 6, reduce=True),
    )
