"""Fold: right sums over leaves in tree order, its bytes, and the same on both ends."""

from dataclasses import replace

import pytest

from firecaffe.exchange import ALGORITHMS, fold
from firecaffe.exchange.check import check
from firecaffe.exchange.leaves import Node, equal_shares
from firecaffe.exchange.proof import prove
from firecaffe.exchange.schedule import Schedule


def schedules(num_elements: int, grain: int = 1) -> list[Schedule]:
    return [
        fold.schedule(fold.inputs_of(leaves, equal_shares(leaves, p)), leaves, num_elements, grain)
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


def test_a_rank_with_m_of_all_nodes_sends_what_the_page_says() -> None:
    for p, leaves in ((3, 16), (5, 11), (7, 64), (4, 4)):
        n = 4 * p
        inputs = fold.inputs_of(leaves, equal_shares(leaves, p))
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
    whole = fold.schedule(fold.inputs_of(7, equal_shares(7, 3)), 7, 12)
    first, last = whole.rounds
    for place in range(len(first)):
        swapped = first[place]._replace(reads=(first[place].reads + 1) % whole.own_inputs(2).stop)
        others = first[:place] + first[place + 1 :]
        for rest in (others, (*others, swapped)):
            assert not prove(replace(whole, whole=(rest, last))).complete
