"""Collectives of every kind: proof, closed formulas, and what a wrong one is found out by."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from firecaffe.exchange import ALGORITHMS, sharded_parameter_server
from firecaffe.exchange.collectives import COLLECTIVES, average, find_collective, half
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AVERAGE,
    BROADCAST,
    KINDS,
    REDUCE_SCATTER,
)

PAIRS = [(kind, name) for kind, by_name in COLLECTIVES.items() for name in by_name]
WORLD_SIZES = range(1, 18)
DIVISIBLE = (720720 * 17) ** 2
"""A multiple of every world size squared, so that all shards and blocks are equal."""


def test_every_kind_has_an_algorithm() -> None:
    assert {*COLLECTIVES, ALL_REDUCE, AVERAGE} == set(KINDS)
    assert all(COLLECTIVES.values())


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_every_rank_ends_with_what_the_kind_says(kind: str, name: str) -> None:
    for world_size in WORLD_SIZES:
        for num_elements in (0, 1, 64, 1009):
            schedule = COLLECTIVES[kind][name](world_size, num_elements)
            check(schedule)
            proof = prove(schedule)
            assert (schedule.kind, schedule.algorithm) == (kind, name)
            assert proof.complete
            # Empty shards have no order, and there is no message for an empty block.
            if num_elements > world_size**2:
                assert proof.in_tree_order == schedule.in_tree_order
                assert schedule.num_messages == len(list(schedule.transfers()))
            sent = sum(t.num_elements for t in schedule.transfers())
            assert schedule.sent_elements == sent


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_no_transfer_can_be_spared(kind: str, name: str) -> None:
    schedule = COLLECTIVES[kind][name](5, 20)
    for number, round_ in enumerate(schedule.rounds):
        for place in range(len(round_)):
            rest = round_[:place] + round_[place + 1 :]
            whole = (*schedule.rounds[:number], rest, *schedule.rounds[number + 1 :])
            assert not prove(replace(schedule, whole=whole)).complete


# Source: Thakur, Rabenseifner, Gropp 2005: (rounds, messages, elements of the vector's length)
# through the busiest port.
COSTS: dict[tuple[str, str], Callable[[int], tuple[int, int, int | Fraction]]] = {
    (REDUCE_SCATTER, "ring"): lambda p: (p - 1, p - 1, Fraction(p - 1, p)),
    (REDUCE_SCATTER, "sharded_parameter_server"): lambda p: (p > 1, p - 1, Fraction(p - 1, p)),
    (ALL_GATHER, "ring"): lambda p: (p - 1, p - 1, Fraction(p - 1, p)),
    (ALL_GATHER, "sharded_parameter_server"): lambda p: (p > 1, p - 1, Fraction(p - 1, p)),
    (BROADCAST, "parameter_server"): lambda p: (p > 1, p - 1, p - 1),
    (BROADCAST, "tree"): lambda p: ((p - 1).bit_length(),) * 3,
    (ALL_TO_ALL, "direct"): lambda p: (p > 1, p - 1, Fraction(p - 1, p * p)),
}


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_costs_are_the_published_ones(kind: str, name: str) -> None:
    for world_size in WORLD_SIZES:
        schedule = COLLECTIVES[kind][name](world_size, DIVISIBLE)
        rounds, messages, elements = COSTS[kind, name](world_size)
        assert len(schedule.rounds) == rounds
        assert schedule.serial_messages() == messages
        assert schedule.serial_elements() == elements * DIVISIBLE
        adds = elements * DIVISIBLE if kind == REDUCE_SCATTER else 0
        assert schedule.serial_additions() == adds


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_average_is_the_all_reduce_with_another_kind(algorithm: str) -> None:
    schedule = average(ALGORITHMS[algorithm])(6, 61)
    assert schedule.kind == AVERAGE
    assert schedule.rounds == ALGORITHMS[algorithm](6, 61).rounds
    assert prove(schedule).complete
    assert find_collective(ALL_REDUCE, algorithm) is ALGORITHMS[algorithm]


def test_what_there_is_not_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"no broadcast 'ring'; .*parameter_server, tree"):
        find_collective(BROADCAST, "ring")


def test_shards_of_any_length_are_gathered() -> None:
    cuts = (0, 7, 7, 50, 64)
    server = partial(sharded_parameter_server.schedule, cuts=cuts)
    schedule = half(server, ALL_GATHER)(4, 64)
    check(schedule)
    assert schedule.own_shards == [(0, 7), (7, 7), (7, 50), (50, 64)]
    assert prove(schedule).complete
    for rank, (start, stop) in enumerate(schedule.own_shards):
        sent = sum(t.num_elements for t in schedule.transfers() if t.source == rank)
        assert sent == 3 * (stop - start)
    assert not prove(replace(schedule, cuts=(0, 8, 8, 50, 64))).complete
