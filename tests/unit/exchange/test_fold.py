"""Fold: right sums over leaves in tree order, its bytes, and the same on both ends."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.exchange import ALGORITHMS, fold
from firecaffe.exchange.leaves import Node, equal_shares, leaves_of
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.schedule import Schedule


def schedules(num_elements: int, grain: int = 1) -> list[Schedule]:
    return [
        fold.schedule(inputs_of(leaves, p), leaves, num_elements, grain, early)
        for early in (False, True)
        for leaves in (1, 2, 3, 7, 8, 16, 21, 33)
        for p in range(1, min(leaves, 17) + 1)
    ]


@pytest.mark.parametrize("num_elements", [0, 1, 61, 1009])
def test_every_rank_ends_with_every_leaf_once_in_tree_order(num_elements: int) -> None:
    for schedule in schedules(num_elements):
        check(schedule)
        proof = prove(schedule)
        assert (proof.complete, proof.in_tree_order) == (True, True)
        transfers = list(schedule.transfers())
        assert schedule.sent_elements == sum(t.num_elements for t in transfers)
        if num_elements >= 61:
            assert schedule.num_messages == len(transfers)


def test_the_way_to_the_owners_alone() -> None:
    for leaves, p in ((1, 1), (2, 2), (6, 2), (7, 3), (16, 4), (21, 5)):
        schedule = fold.reduce_scatter(inputs_of(leaves, p), leaves, 61)
        check(schedule)
        proof, transfers = prove(schedule), list(schedule.transfers())
        assert (schedule.kind, len(schedule.rounds)) == ("reduce_scatter", int(p > 1))
        assert (proof.complete, proof.in_tree_order) == (True, True)
        assert schedule.sent_elements == sum(t.num_elements for t in transfers)
        assert schedule.num_messages == len(transfers)


@settings(max_examples=60)
@given(st.integers(1, 24), st.integers(1, 6), st.booleans(), st.data())
def test_shards_of_any_length(leaves: int, p: int, early: bool, data: st.DataObject) -> None:
    p = min(p, leaves)
    inner = data.draw(st.lists(st.integers(0, 61), min_size=p - 1, max_size=p - 1))
    cuts = (0, *sorted(inner), 61)
    for schedule in (
        fold.schedule(inputs_of(leaves, p), leaves, 61, early=early, cuts=cuts),
        fold.reduce_scatter(inputs_of(leaves, p), leaves, 61, early, cuts),
    ):
        check(schedule)
        proof = prove(schedule)
        assert schedule.own_shards == list(pairwise(cuts))
        assert (proof.complete, proof.in_tree_order) == (True, True)
        assert schedule.sent_elements == sum(t.num_elements for t in schedule.transfers())


def test_early_rounds_go_to_the_owners_too() -> None:
    schedule = fold.reduce_scatter(inputs_of(16, 3), 16, 61, early=True)
    assert len(schedule.rounds) == schedule.num_rounds == schedule.early_rounds + 1
    assert all(t.reduce for t in schedule.transfers())


def inputs_of(num_leaves: int, world_size: int) -> list[list[Node]]:
    return fold.inputs_of(num_leaves, equal_shares(num_leaves, world_size))


@settings(max_examples=60)
@given(st.integers(1, 24), st.sets(st.integers(1, 23), max_size=5), st.booleans())
def test_shares_of_any_size(num_leaves: int, cuts: set[int], early: bool) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < num_leaves), num_leaves]
    shares = tuple(range(a, b) for a, b in pairwise(bounds))
    schedule = fold.schedule(fold.inputs_of(num_leaves, shares), num_leaves, 61, early=early)
    check(schedule)
    proof = prove(schedule)
    assert (proof.complete, proof.in_tree_order) == (True, True)


def test_after_the_early_rounds_one_node_of_each_rank_is_left() -> None:
    """Which is the sharded server's traffic, whatever shares are."""
    for p, leaves in ((3, 16), (5, 13), (7, 64)):
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


def test_where_ranks_have_one_node_each_nothing_goes_early() -> None:
    schedule = fold.schedule(inputs_of(8, 4), 8, 61, early=True)
    assert (schedule.early_rounds, schedule.num_rounds) == (0, 2)


def test_a_rank_with_m_of_all_nodes_sends_what_the_page_says() -> None:
    for p, leaves in ((3, 16), (5, 11), (7, 64), (4, 4)):
        n = 4 * p
        inputs = inputs_of(leaves, p)
        schedule = fold.schedule(inputs, leaves, n)
        for rank, own in enumerate(inputs):
            sent = sum(t.num_elements for t in schedule.transfers() if t.source == rank)
            assert sent == (len(own) + 1) * (p - 1) * n // p


def test_with_one_node_a_rank_it_is_the_sharded_server() -> None:
    for p in (1, 2, 4, 8):
        ours = fold.schedule([[Node(0, rank)] for rank in range(p)], p, 61)
        ways = [[t[:5] for t in round_] for round_ in ours.rounds]
        servers = ALGORITHMS["sharded_parameter_server"](p, 61).rounds
        assert ways == [[t[:5] for t in round_] for round_ in servers]


def test_shards_are_of_whole_grains() -> None:
    for schedule in schedules(40, grain=8):
        assert prove(schedule).in_tree_order
        assert all(t.start % 8 == t.stop % 8 == 0 for t in schedule.transfers())


def test_no_transfer_can_be_spared_and_no_input_taken_for_another() -> None:
    whole = fold.schedule(inputs_of(7, 3), 7, 12)
    first, last = whole.rounds
    for place in range(len(first)):
        swapped = first[place]._replace(reads=(first[place].reads + 1) % whole.own_inputs(2).stop)
        others = first[:place] + first[place + 1 :]
        for rest in (others, (*others, swapped)):
            assert not prove(replace(whole, whole=(rest, last))).complete
