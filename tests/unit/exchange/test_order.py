"""Which exchange adds in tree order: its rule, an argument, and the proof; and exchanges over
nodes, with costs of the two parts, and what crosses between nodes.
"""

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE, ROOTED, find_schedule
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.route import adds_in_tree_order, keeps_tree_order
from firecaffe.exchange.schedule import Schedule


def at_every_size(p: int) -> bool:
    """All parts meet at one owner, or level by level of the very tree."""
    return p >= 1


def two_at_most(p: int) -> bool:
    """A chain, or an unknown order. Of three ranks, one chunk of the ring starts at rank 1."""
    return p <= 2


def three_at_most(p: int) -> bool:
    """One fold of a rank and its two children. Of four ranks, the second tree brings the parts of
    ranks 0 and 3 to rank 0 first.
    """
    return p <= 3


def pairs_fill_the_left(p: int) -> bool:
    """Where pairing up the first 2 r of p = q + r ranks leaves the tree as it is.

    The tree splits p ranks into the first q and the other r. Doubling splits the q active ranks
    into halves of q / 2, each a pair or a single rank: the left half holds q ranks only if there
    are no singles in it, so r is at least q / 2 (or 0: no pairs at all); and the right half, of
    r ranks in q / 2 groups, must be right in itself.
    """
    q = 1
    while 2 * q <= p:
        q *= 2
    r = p - q
    return r == 0 or (2 * r >= q and pairs_fill_the_left(r))


IN_TREE_ORDER: dict[str, Callable[[int], bool]] = {
    "parameter_server": at_every_size,
    "sharded_parameter_server": at_every_size,
    "tree": at_every_size,
    "pipelined_tree": at_every_size,
    "double_tree": three_at_most,
    "ring": two_at_most,
    "recursive_doubling": pairs_fill_the_left,
    "halving_doubling": pairs_fill_the_left,
    NATIVE: two_at_most,
}


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_tree_order(algorithm: str) -> None:
    argued = [p for p in range(1, 41) if IN_TREE_ORDER[algorithm](p)]
    assert [p for p in range(1, 41) if adds_in_tree_order(algorithm, p)] == argued
    assert keeps_tree_order(algorithm) == (algorithm not in ("ring", "double_tree", NATIVE))


def test_pairing_up_suits_ones_followed_by_zeros() -> None:
    """The same world sizes in closed form, 2^a - 2^b; powers of two are 2^(b + 1) - 2^b."""
    closed = {2**a - 2**b for a in range(1, 8) for b in range(a)}
    assert {p for p in range(1, 100) if pairs_fill_the_left(p)} == {p for p in closed if p < 100}


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
    """And one rank a node is outer, and one node is inner, to the last transfer."""
    for world_size, m in NODES:
        num_elements = 12 * world_size
        whole = over_nodes(inner, outer, world_size, m, num_elements)
        within, across = ALGORITHMS[inner](m, num_elements), ALGORITHMS[outer]
        parts = within, across(world_size // m, num_elements)
        if m in (1, world_size):
            assert whole.rounds == parts[m == 1].rounds
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
        among_nodes = (
            t._replace(source=t.source // m, destination=t.destination // m) for t in across
        )
        expected = ALGORITHMS[outer](world_size // m, 1009).transfers()
        assert Counter(t[:5] for t in among_nodes) == Counter(t[:5] for t in expected)


@pytest.mark.parametrize(("inner", "outer"), PAIRS)
def test_tree_order_of_nodes(inner: str, outer: str) -> None:
    """A node of m ranks is a node of the tree if m is a power of two; else the tree cuts nodes,
    for its left side is a power of two of ranks. Above whole nodes it is the tree over nodes.
    """
    for world_size, m in NODES:
        nodes = world_size // m
        expected = nodes == 1 or (m & (m - 1) == 0 and adds_in_tree_order(outer, nodes))
        assert adds_in_tree_order(f"hierarchical({inner},{outer})", world_size, m) == expected
    assert keeps_tree_order(f"hierarchical({inner},{outer})") == keeps_tree_order(outer)


@pytest.mark.parametrize(("world_size", "m"), [(7, 2), (2, 4), (9, 6)])
def test_nodes_must_be_whole(world_size: int, m: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} ranks do not fill nodes of {m}"):
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
    with pytest.raises(ValueError, match="ranks_per_node is 0"):
        find_schedule(name, 0)
