"""How gradients go: one function for all who ask."""

from itertools import product

import pytest

from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.leaves import largest_nodes, leaf_share
from firecaffe.exchange.route import (
    CODEC,
    FOLD,
    HOOK,
    SCHEDULE,
    adds_in_tree_order,
    find_route,
    keeps_tree_order,
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
    hooked = find_route("tree", 8, ranks, hook="bf16_compress_hook")
    assert (hooked.way, hooked.is_invariant) == (HOOK, ranks == 1)
    assert "bf16_compress_hook" in hooked.description


def test_what_a_record_says() -> None:
    assert find_route("tree", 8, 4).description == "tree"
    assert find_route("tree", 8, 3).description == "fold"
    assert find_route("tree", 8, 4, 4, shared_memory=True).description == "shared memory"
    both = find_route("tree", 8, 4, 2, shared_memory=True).description
    assert both == "shared memory, tree between hosts"
    nested = find_route("hierarchical(tree,ring)", 8, 4, 2, shared_memory=True).description
    assert nested == "shared memory, ring between hosts"
    assert find_route("tree", 8, 2, codec="int8", level=1).description.startswith("int8 at level 1")


def test_nothing_stands_in_for_an_exchange_of_vectors() -> None:
    """`bench exchange` and `parallelize` run what they are told, at any number of ranks."""
    for name, ranks, size in product(NAMES, range(1, 9), (1, 2, 4)):
        if ranks % size:
            continue
        route = find_route(name, None, ranks, size)
        in_order = adds_in_tree_order(name, ranks, size)
        assert (route.way, route.is_invariant) == (SCHEDULE, ranks == 1 or in_order)


def test_the_exchange_between_hosts_is_the_routes() -> None:
    for name, across in {"tree": "tree", "hierarchical(tree,ring)": "ring", "native": ""}.items():
        assert find_route(name, None, 6, 2, shared_memory=True).across == across
        assert find_route(name, None, 6, 2).across == ""
