"""Exchanges over nodes: right sums, costs of the two parts, and what crosses between nodes."""

import re
from collections import Counter
from itertools import product

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE, ROOTED, find_schedule
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.route import adds_in_tree_order, keeps_tree_order
from firecaffe.exchange.schedule import Schedule

NODES = [(p, m) for p in range(1, 18) for m in range(1, p + 1) if p % m == 0]
PAIRS = list(product(ROOTED, ALGORITHMS))


def over_nodes(inner: str, outer: str, world_size: int, m: int, num_elements: int) -> Schedule:
    name = f"hierarchical({inner},{outer})"
    schedule = find_schedule(name, ranks_per_node=m)(world_size, num_elements)
    assert (schedule.algorithm, schedule.world_size) == (name, world_size)
    assert schedule.num_elements == num_elements
    return schedule


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_every_rank_ends_with_every_part_once(inner: str, outer: str) -> None:
    for (world_size, m), num_elements in product(NODES, (0, 1, 1009)):
        schedule = over_nodes(inner, outer, world_size, m, num_elements)
        check(schedule)
        assert prove(schedule).complete
        assert schedule.rounds or world_size == 1 or num_elements == 0


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_costs_are_those_of_inner_and_outer(inner: str, outer: str) -> None:
    for world_size, m in NODES:
        num_elements = 12 * world_size
        whole = over_nodes(inner, outer, world_size, m, num_elements)
        parts = (
            ALGORITHMS[inner](m, num_elements),
            ALGORITHMS[outer](world_size // m, num_elements),
        )
        for cost in (
            lambda schedule: len(schedule.rounds),
            Schedule.serial_messages,
            Schedule.serial_elements,
            Schedule.serial_additions,
            Schedule.elements_of_busiest_rank,
        ):
            assert cost(whole) == sum(map(cost, parts))


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_only_first_ranks_speak_across_nodes_and_only_as_outer_does(inner: str, outer: str) -> None:
    for world_size, m in NODES:
        whole = over_nodes(inner, outer, world_size, m, 1009)
        across = [t for t in whole.transfers() if t.source // m != t.destination // m]
        assert all(t.source % m == t.destination % m == 0 for t in across)
        between_nodes = Counter(
            (t.source // m, t.destination // m, t.start, t.stop, t.reduce) for t in across
        )
        assert between_nodes == Counter(
            (t.source, t.destination, t.start, t.stop, t.reduce)
            for t in ALGORITHMS[outer](world_size // m, 1009).transfers()
        )


def test_one_rank_a_node_is_outer_and_one_node_is_inner() -> None:
    for inner, outer in PAIRS:
        assert over_nodes(inner, outer, 6, 1, 60).rounds == ALGORITHMS[outer](6, 60).rounds
        assert over_nodes(inner, outer, 6, 6, 60).rounds == ALGORITHMS[inner](6, 60).rounds


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_tree_order(inner: str, outer: str) -> None:
    """A node of m ranks is a node of the tree if m is a power of two; else the tree cuts nodes,
    for its left side is a power of two of ranks. Above whole nodes it is the tree over nodes.
    """
    for world_size, m in NODES:
        nodes = world_size // m
        expected = nodes == 1 or (m & (m - 1) == 0 and adds_in_tree_order(outer, nodes))
        assert adds_in_tree_order(f"hierarchical({inner},{outer})", world_size, m) == expected


def test_made_for_tree_order() -> None:
    for inner, outer in PAIRS:
        assert keeps_tree_order(f"hierarchical({inner},{outer})") == keeps_tree_order(outer)


@pytest.mark.parametrize(("world_size", "m"), [(7, 2), (2, 4), (9, 6)])
def test_nodes_must_be_whole(world_size: int, m: int) -> None:
    message = f"{world_size} ranks do not fill nodes of {m}; .* multiple of ranks_per_node"
    with pytest.raises(ValueError, match=message):
        find_schedule("hierarchical(tree,ring)", m)(world_size, 100)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_row_of_the_table_is_found_whatever_the_nodes(algorithm: str) -> None:
    assert find_schedule(algorithm) is ALGORITHMS[algorithm]
    assert find_schedule(algorithm, ranks_per_node=3) is ALGORITHMS[algorithm]


REFUSED = {
    "rign": f"no exchange 'rign'; the exchanges are {', '.join(EXCHANGES)}, hierarchical",
    "": "no exchange ''",
    NATIVE: f"native is .* has no schedule; those that have are {', '.join(ALGORITHMS)}$",
    "hierarchical": "no exchange 'hierarchical'",
    "hierarchical(tree)": "no exchange",
    "hierarchical(tree, ring)": "no exchange",
    "hierarchical(tree,ring)x": "no exchange",
    "hierarchical(ring,tree)": "inner is 'ring'; it must be one of parameter_server, tree$",
    "hierarchical(pipelined_tree,tree)": "inner is 'pipelined_tree'; it must be one of",
    "hierarchical(tree,rign)": f"outer is 'rign'; it must be one of {', '.join(ALGORITHMS)}$",
    "hierarchical(tree,native)": "outer is 'native'; it must be one of",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_unknown_names_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        find_schedule(name, 2)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["tree", "hierarchical(tree,ring)"])
def test_a_node_has_a_rank(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape("ranks_per_node is 0; it must be at least 1")):
        find_schedule(name, 0)
