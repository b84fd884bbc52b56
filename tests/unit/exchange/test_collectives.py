"""Collectives of every kind, fold, and sums in shared memory, as schedules: proof, closed formulas,
and what a wrong one is found out by.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.exchange import ALGORITHMS, fold, sharded_parameter_server
from firecaffe.exchange.collectives import COLLECTIVES, average, find_collective, half
from firecaffe.exchange.leaves import Node, equal_shares, leaves_of
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.route import find_route
from firecaffe.exchange.schedule import (
    ALL_GATHER,
    ALL_REDUCE,
    AVERAGE,
    BROADCAST,
    KINDS,
    REDUCE_SCATTER,
    Schedule,
)
from firecaffe.exchange.shared_memory import LINE_ELEMENTS, memory_part
from firecaffe.exchange.shared_memory import schedule as in_memory
from tests.kit.exchange import WORLD_SIZES

PAIRS = [(kind, name) for kind, by_name in COLLECTIVES.items() for name in by_name]


def in_tree_order(schedule: Schedule, has_empty: bool = False) -> bool:
    """Of a schedule that is allowed and complete, and counts its messages; there is none for an
    empty slice.
    """
    check(schedule)
    proof, transfers = prove(schedule), list(schedule.transfers())
    assert proof.complete
    assert schedule.sent_elements == sum(t.num_elements for t in transfers)
    assert has_empty or schedule.num_messages == len(transfers)
    return proof.in_tree_order


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_every_rank_ends_with_what_the_kind_says(kind: str, name: str) -> None:
    for world_size, num_elements in product(WORLD_SIZES, (0, 1, 64, 1009)):
        schedule = COLLECTIVES[kind][name](world_size, num_elements)
        assert (schedule.kind, schedule.algorithm) == (kind, name)
        has_empty = num_elements <= world_size**2  # slices, which have no order
        assert in_tree_order(schedule, has_empty) == schedule.in_tree_order or has_empty
        assert len(schedule.rounds) <= schedule.num_rounds
        if not has_empty:
            rounds = {"ring": world_size - 1, "tree": (world_size - 1).bit_length()}
            assert len(schedule.rounds) == rounds.get(name, int(world_size > 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_average_is_the_all_reduce_with_another_kind(algorithm: str) -> None:
    schedule = average(ALGORITHMS[algorithm])(6, 61)
    assert schedule.kind == AVERAGE
    assert schedule.rounds == ALGORITHMS[algorithm](6, 61).rounds
    assert prove(schedule).complete
    assert find_collective(ALL_REDUCE, algorithm) is ALGORITHMS[algorithm]


def test_every_kind_has_an_algorithm_and_what_there_is_not_is_refused() -> None:
    assert {*COLLECTIVES, ALL_REDUCE, AVERAGE} == set(KINDS)
    assert all(COLLECTIVES.values())
    with pytest.raises(ValueError, match=r"no broadcast 'ring'; .*parameter_server, tree"):
        find_collective(BROADCAST, "ring")


def test_shards_of_any_length_are_gathered() -> None:
    cuts = (0, 7, 7, 50, 64)
    server = partial(sharded_parameter_server.schedule, cuts=cuts)
    schedule = half(server, ALL_GATHER)(4, 64)
    assert schedule.own_shards == [(0, 7), (7, 7), (7, 50), (50, 64)]
    in_tree_order(schedule, has_empty=True)
    for rank, (start, stop) in enumerate(schedule.own_shards):
        sent = sum(t.num_elements for t in schedule.transfers() if t.source == rank)
        assert sent == 3 * (stop - start)
    assert not prove(replace(schedule, cuts=(0, 8, 8, 50, 64))).complete


def inputs_of(num_leaves: int, world_size: int) -> list[list[Node]]:
    return fold.inputs_of(num_leaves, equal_shares(num_leaves, world_size))


@pytest.mark.parametrize(("num_elements", "grain"), [(0, 1), (1, 1), (61, 1), (1009, 1), (40, 8)])
def test_every_rank_ends_with_every_leaf_once_in_tree_order(num_elements: int, grain: int) -> None:
    for early, leaves in product((False, True), (1, 2, 3, 7, 8, 16, 21, 33)):
        for p in range(1, min(leaves, 17) + 1):
            schedule = fold.schedule(inputs_of(leaves, p), leaves, num_elements, grain, early)
            assert in_tree_order(schedule, has_empty=num_elements < 61)
            assert all(t.start % grain == t.stop % grain == 0 for t in schedule.transfers())


@settings(max_examples=100)
@given(st.integers(1, 24), st.sets(st.integers(1, 23), max_size=5), st.booleans(), st.data())
def test_shares_and_shards_of_any_length(
    leaves: int, bounds: set[int], early: bool, data: st.DataObject
) -> None:
    """To all ranks, and to the owners alone."""
    ends = [0, *sorted(bound for bound in bounds if bound < leaves), leaves]
    p = len(ends) - 1
    inputs = fold.inputs_of(leaves, tuple(range(a, b) for a, b in pairwise(ends)))
    inner = data.draw(st.lists(st.integers(0, 61), min_size=p - 1, max_size=p - 1))
    cuts = (0, *sorted(inner), 61)
    whole = fold.schedule(inputs, leaves, 61, early=early, cuts=cuts)
    to_owners = fold.reduce_scatter(inputs, leaves, 61, early, cuts)
    assert to_owners.kind == REDUCE_SCATTER
    assert to_owners.num_rounds == whole.num_rounds - 1 == whole.early_rounds + 1
    for schedule in (whole, to_owners):
        assert schedule.own_shards == list(pairwise(cuts))
        assert in_tree_order(schedule, has_empty=len(set(cuts)) <= p)
        assert len(schedule.rounds) <= schedule.num_rounds


def test_after_the_early_rounds_one_node_of_each_rank_is_left() -> None:
    """Which is the sharded server's traffic, whatever shares are."""
    for p, leaves in ((3, 16), (5, 13), (7, 64), (4, 8)):
        schedule = fold.schedule(inputs_of(leaves, p), leaves, 4 * p, early=True)
        early, late = schedule.rounds[:-2], schedule.rounds[-2:]
        assert len(early) == schedule.early_rounds == max(map(len, schedule.inputs)) - 1
        server = ALGORITHMS["sharded_parameter_server"](p, 4 * p)
        assert [len(round_) for round_ in late] == [len(round_) for round_ in server.rounds]
        assert schedule.late().serial_elements() == server.serial_elements()
        # Each rank sends its nodes in the order of their sizes.
        nodes = [node for own in schedule.inputs for node in own]
        for rank in range(p):
            sent = [t for round_ in (*early, late[0]) for t in round_ if t.source == rank]
            sizes = [len(leaves_of(nodes[t.reads], leaves)) for t in sent]
            assert sizes == sorted(sizes)


def test_no_transfer_can_be_spared_and_no_input_taken_for_another() -> None:
    whole = fold.schedule(inputs_of(7, 3), 7, 12)
    first, last = whole.rounds
    for place in range(len(first)):
        swapped = first[place]._replace(reads=(first[place].reads + 1) % whole.own_inputs(2).stop)
        others = first[:place] + first[place + 1 :]
        for rest in (others, (*others, swapped)):
            assert not prove(replace(whole, whole=(rest, last))).complete


HOSTS = [(1, 2), (1, 3), (1, 7), (2, 2), (2, 3), (3, 2), (4, 4), (5, 2)]


def shared(hosts: int, m: int, num_elements: int, outer: str = "tree") -> Schedule:
    return in_memory(hosts * m, num_elements, outer=ALGORITHMS[outer], ranks_per_host=m)


@pytest.mark.parametrize("outer", ALGORITHMS)
def test_sums_in_memory_end_with_every_part_once(outer: str) -> None:
    for (hosts, m), num_elements in product(HOSTS, (0, 1, 15, 1009)):
        whole = shared(hosts, m, num_elements, outer)
        check(whole)
        proof = prove(whole)
        assert proof.complete
        if num_elements:
            assert proof.in_tree_order >= whole.in_tree_order
        sent = [t for t in whole.transfers() if not whole.in_memory(t)]
        assert all(t.source % m == t.destination % m == 0 for t in sent)
        assert sent == list(whole.by_messages().transfers())
        assert whole.sent_elements == sum(t.num_elements for t in sent)
        between = ALGORITHMS[outer](hosts, num_elements)
        assert whole.serial_messages() == between.serial_messages()
        assert whole.serial_elements() == between.serial_elements()
        assert whole.elements_of_busiest_rank() == between.elements_of_busiest_rank()
        if num_elements > 1000:
            assert proof.in_tree_order == whole.in_tree_order
            assert whole.num_messages == len(sent)
            assert len(whole.rounds) <= whole.num_rounds


def test_a_route_is_invariant_if_its_schedule_is_in_tree_order() -> None:
    names = *ALGORITHMS, "hierarchical(tree,tree)", "hierarchical(tree,ring)"
    for name, (hosts, m) in product(names, HOSTS):
        route = find_route(name, 2 * hosts * m, hosts * m, m, shared_memory=True)
        if route.shares_memory:
            assert prove(route.schedule(1009)).in_tree_order >= route.is_invariant


@pytest.mark.parametrize(("hosts", "m"), HOSTS)
@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 100, 1009, 200_003])
def test_the_ranks_of_a_host_add_each_element_once(hosts: int, m: int, num_elements: int) -> None:
    whole = shared(hosts, m, num_elements)
    for host in range(hosts):
        first = host * m
        parts = {rank: memory_part(whole, rank) for rank in range(first, first + m)}
        added = sorted(slice_ for part in parts.values() for slice_ in part.adds)
        assert [e for start, stop in added for e in range(start, stop)] == [*range(num_elements)]
        assert all(start % LINE_ELEMENTS == 0 for start, _ in added)
        for rank, part in parts.items():
            if part.adds:
                assert part.into == ([*parts] if hosts == 1 else [first])
            has_total = hosts == 1 or rank == first or not num_elements
            assert part.reads == (None if has_total else first)


def test_ranks_that_fill_no_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 .* 2"):
        in_memory(7, 10, outer=ALGORITHMS["tree"], ranks_per_host=2)
