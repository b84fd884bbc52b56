"""How gradients go, and what goes by it: one function for all who ask; the choice by a link,
against docs/explanation/exchange.md's formulas, worked out by hand; how many vectors are under way;
how they are cut.
"""

from collections import Counter
from itertools import pairwise, product

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE, useful_lanes
from firecaffe.exchange.leaves import largest_nodes, leaf_share
from firecaffe.exchange.route import (
    CODEC,
    FOLD,
    HOOK,
    SCHEDULE,
    adds_in_tree_order,
    choose,
    find_route,
    keeps_tree_order,
    predict_s,
)
from firecaffe.exchange.schedule import (
    PIECES,
    SHORTEST_MESSAGE_BYTES,
    SHORTEST_WHOLE_BYTES,
    lower_bound_elements,
    pieces,
)

NAMES = (*EXCHANGES, "hierarchical(tree,ring)", "hierarchical(tree,halving_doubling)")


def test_an_exchange_made_for_tree_order_never_leaves_it() -> None:
    for name, ranks, leaves in product(EXCHANGES, range(1, 9), range(8, 17)):
        route = find_route(name, leaves, ranks)
        if keeps_tree_order(name):
            assert route.is_invariant, (name, ranks, leaves)
        # One sum of each worker continues the tree only if its share is one node of it.
        nodes = [largest_nodes(leaves, leaf_share(leaves, ranks, rank)) for rank in range(ranks)]
        if route.way == SCHEDULE and route.is_invariant:
            assert all(len(own) == 1 for own in nodes), (name, ranks, leaves)
        assert (route.way == FOLD) <= keeps_tree_order(name)
        assert route.description == (FOLD if route.way == FOLD else name)


def test_memory_is_shared_only_if_no_bit_changes() -> None:
    for name, size, hosts in product(NAMES, (1, 2, 3, 4), (1, 2, 3, 4)):
        route = find_route(name, 2 * size * hosts, size * hosts, size, shared_memory=True)
        assert route.senders == (hosts if route.shares_memory else size * hosts)
        if not route.shares_memory or name.startswith("hierarchical"):
            continue
        assert route.way == SCHEDULE
        assert size > 1
        assert hosts == 1 or size in (2, 4)  # else a host's sum is no node of the tree
        assert adds_in_tree_order(route.across, hosts)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_codec_or_a_hook_takes_the_gradients_whatever_the_algorithm(ranks: int) -> None:
    coded = find_route("ring", 8, ranks, 2, shared_memory=True, codec="int8", level=1)
    assert (coded.way, coded.is_invariant, coded.shares_memory) == (CODEC, True, False)
    assert coded.description.startswith("int8 at level 1")
    hooked = find_route("tree", 8, ranks, hook="bf16_compress_hook")
    assert (hooked.way, hooked.is_invariant) == (HOOK, ranks == 1)
    assert "bf16_compress_hook" in hooked.description


def test_nothing_stands_in_for_an_exchange_of_vectors() -> None:
    """`bench exchange` and `parallelize` run what they are told, at any number of ranks."""
    for name, ranks, size in product(NAMES, range(1, 9), (1, 2, 4)):
        if ranks % size:
            continue
        route = find_route(name, None, ranks, size)
        in_order = adds_in_tree_order(name, ranks, size)
        assert (route.way, route.is_invariant) == (SCHEDULE, ranks == 1 or in_order)


def test_the_exchange_between_hosts_is_the_routes() -> None:
    for name, across in {"tree": "tree", "hierarchical(tree,ring)": "ring", NATIVE: ""}.items():
        route = find_route(name, None, 6, 2, shared_memory=True)
        assert (route.across, find_route(name, None, 6, 2).across) == (across, "")
        assert f"{across} between hosts" in route.description or name == NATIVE


ALPHA_S, BANDWIDTH = 50e-6, 25e6
"""The emulated cluster's: 50 µs and 200 Mbit/s."""
SIZE_BYTES = 7_000_000
SERIAL = {  # messages one after the other, and vectors' lengths, at p = 8
    "parameter_server": (14, 14),
    "sharded_parameter_server": (14, 14 / 8),
    "tree": (6, 6),
    "recursive_doubling": (3, 3),
    "halving_doubling": (6, 14 / 8),
}


def test_prediction_is_the_formula() -> None:
    found = choose(8, [SIZE_BYTES], ALPHA_S, BANDWIDTH).by_algorithm
    for name, (messages, vectors) in SERIAL.items():
        expected_s = messages * ALPHA_S + vectors * SIZE_BYTES / BANDWIDTH
        assert found[name] == pytest.approx(expected_s)
    assert predict_s(ALGORITHMS["tree"](4, 1000), 0.0, 1.0, 2) == 4 * 2000


def test_long_vectors_want_few_bytes_and_short_ones_few_messages() -> None:
    """3 α + 3 B β against 6 α + 14/8 B β: equal at B = 3 α / (5/4 β) = 3000 bytes."""
    few, many = "recursive_doubling", "halving_doubling"
    for size_bytes, algorithm in ((2900, few), (3100, many), (SIZE_BYTES, many)):
        assert choose(8, [size_bytes], ALPHA_S, BANDWIDTH).algorithm == algorithm


@pytest.mark.parametrize("world_size", range(2, 18))
def test_only_what_keeps_every_bit_is_chosen_from_and_the_fastest_taken(world_size: int) -> None:
    for size_bytes in (4, 100_000, SIZE_BYTES):
        found = choose(world_size, [size_bytes], ALPHA_S, BANDWIDTH)
        in_order = [name for name in ALGORITHMS if adds_in_tree_order(name, world_size)]
        assert list(found.by_algorithm) == in_order
        assert found.predicted_s == min(found.by_algorithm.values())
        assert found.predicted_s == found.by_algorithm[found.algorithm]
        least = lower_bound_elements(world_size, size_bytes // 4) * 4 / BANDWIDTH
        assert found.predicted_s >= least


def test_times_of_all_vectors_add_up_by_whole_elements() -> None:
    both = choose(8, [4001, SIZE_BYTES, 4004], ALPHA_S, BANDWIDTH)
    short, long = (choose(8, [size], ALPHA_S, BANDWIDTH) for size in (4004, SIZE_BYTES))
    for name, seconds in both.by_algorithm.items():
        assert seconds == pytest.approx(2 * short.by_algorithm[name] + long.by_algorithm[name])


def test_ties_go_to_the_earlier_row() -> None:
    # With no latency halving-doubling and the sharded server both send the least there is.
    found = choose(8, [8000], 0.0, BANDWIDTH)
    assert found.by_algorithm["halving_doubling"] == found.predicted_s
    assert found.algorithm == "sharded_parameter_server"
    assert choose(8, [], ALPHA_S, BANDWIDTH).algorithm == "parameter_server"


def test_where_one_rank_of_each_host_sends_it_is_predicted_for_them() -> None:
    for world_size, senders in ((1, None), (4, 1)):  # nothing is sent
        found = choose(world_size, [SIZE_BYTES], ALPHA_S, BANDWIDTH, senders)
        assert (found.algorithm, found.predicted_s) == ("tree", 0)
    found = choose(24, [SIZE_BYTES], ALPHA_S, BANDWIDTH, senders=6)
    messages_and_bytes = 6 * ALPHA_S + 6 * SIZE_BYTES / BANDWIDTH
    assert found.by_algorithm["tree"] == pytest.approx(messages_and_bytes)
    # In tree order over 6 hosts, but not over the 10 ranks that the same name stands for.
    assert adds_in_tree_order("recursive_doubling", 6)
    assert "recursive_doubling" not in choose(10, [SIZE_BYTES], ALPHA_S, BANDWIDTH, 6).by_algorithm
    assert "ring" not in choose(8, [SIZE_BYTES], ALPHA_S, BANDWIDTH, senders=2).by_algorithm
    # And the other way round: over the 12 ranks, but not over 5 that send.
    assert adds_in_tree_order("recursive_doubling", 12)
    assert "recursive_doubling" not in choose(12, [SIZE_BYTES], ALPHA_S, BANDWIDTH, 5).by_algorithm


RANKS, ELEMENTS = 8, 840


def ports_are_alike(algorithm: str) -> bool:
    """Whether all ranks send and receive equally much in each round."""
    schedule = ALGORITHMS[algorithm](RANKS, ELEMENTS)
    for transfers in schedule.rounds:
        sent, arrived = Counter[int](), Counter[int]()
        for transfer in transfers:
            sent[transfer.source] += transfer.num_elements
            arrived[transfer.destination] += transfer.num_elements
        if len({*sent.values(), *arrived.values()}) > 1 or len(sent) < RANKS:
            return False
    return True


def test_a_second_vector_goes_where_a_direction_of_a_link_is_idle() -> None:
    """By hosts, the total comes down a tree; and a library tells vectors apart by their order."""
    for algorithm in ALGORITHMS:
        assert useful_lanes(algorithm) == (1 if ports_are_alike(algorithm) else 2)
    assert (useful_lanes("hierarchical(tree,ring)"), useful_lanes(NATIVE)) == (2, 1)


LEAST, WHOLE = SHORTEST_MESSAGE_BYTES // 4, SHORTEST_WHOLE_BYTES // 4
"""Elements of float32."""


@pytest.mark.parametrize(
    ("algorithm", "world_size", "num_elements", "count"),
    [
        ("tree", 2, 2 * WHOLE - 1, 1),  # every message is the whole vector
        ("tree", 2, 2 * WHOLE, 2),
        ("tree", 8, 100 * WHOLE, PIECES),
        ("tree", 8, 4_000_000, PIECES),
        ("tree", 8, 4_000_001, 2 * PIECES),
        ("ring", 8, 8 * WHOLE, 1),  # every message is an eighth; its cuts decide bits
        ("ring", 8, 16 * WHOLE, 2),
        ("halving_doubling", 4, 8 * LEAST, 3),  # halves and quarters: 3 / 8 on average
        ("recursive_doubling", 4, 3 * WHOLE, 3),
        ("pipelined_tree", 8, 20 * LEAST, 1),
        ("double_tree", 8, 20 * LEAST, 1),
        ("tree", 1, 20 * WHOLE, 1),
        ("tree", 4, 0, 1),
    ],
)
def test_pieces_have_messages_of_some_length(
    algorithm: str, world_size: int, num_elements: int, count: int
) -> None:
    schedule = ALGORITHMS[algorithm](world_size, num_elements)
    found = pieces(schedule, 4)
    assert len(found) == count
    assert (found[0][0], found[-1][1]) == (0, num_elements)
    assert all(stop == start for (_, stop), (start, _) in pairwise(found))
