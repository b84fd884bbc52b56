"""Sums in shared memory as a schedule: right sums, the tree's order, and what leaves a host."""

from itertools import product

import pytest

from firecaffe.exchange import ALGORITHMS
from firecaffe.exchange.proof import check, prove
from firecaffe.exchange.route import find_route
from firecaffe.exchange.schedule import Schedule
from firecaffe.exchange.shared_memory import LINE_ELEMENTS, memory_part, schedule

HOSTS = [(1, 2), (1, 3), (1, 7), (2, 2), (2, 3), (3, 2), (4, 4), (5, 2)]


@pytest.mark.parametrize("outer", ALGORITHMS)
def test_every_rank_ends_with_every_part_once(outer: str) -> None:
    for (hosts, m), num_elements in product(HOSTS, (0, 1, 15, 1009)):
        whole = schedule(hosts * m, num_elements, outer=ALGORITHMS[outer], ranks_per_host=m)
        check(whole)
        proof = prove(whole)
        assert proof.complete
        if num_elements:
            assert proof.in_tree_order >= whole.in_tree_order
        sent = [t for t in whole.transfers() if not whole.in_memory(t)]
        assert all(t.source % m == t.destination % m == 0 for t in sent)
        assert sent == list(whole.by_messages().transfers())
        assert whole.sent_elements == sum(t.num_elements for t in sent)
        if num_elements > 1000:
            assert proof.in_tree_order == whole.in_tree_order
            assert whole.num_messages == len(sent)
            assert len(whole.rounds) <= whole.num_rounds


@pytest.mark.parametrize("outer", ["tree", "ring", "halving_doubling", "double_tree"])
def test_what_leaves_a_host_is_what_outer_sends(outer: str) -> None:
    between = ALGORITHMS[outer](3, 1009)
    whole = schedule(12, 1009, outer=ALGORITHMS[outer], ranks_per_host=4)
    for cost in (
        Schedule.serial_messages,
        Schedule.serial_elements,
        Schedule.elements_of_busiest_rank,
    ):
        assert cost(whole) == cost(between)
    alone = schedule(4, 1009, outer=ALGORITHMS[outer], ranks_per_host=4)
    assert alone.elements_of_busiest_rank() == alone.serial_messages() == 0


def test_a_route_is_invariant_if_its_schedule_is_in_tree_order() -> None:
    for name, (hosts, m) in product(
        [*ALGORITHMS, "hierarchical(tree,tree)", "hierarchical(tree,ring)"], HOSTS
    ):
        route = find_route(name, 2 * hosts * m, hosts * m, m, shared_memory=True)
        if route.shares_memory:
            assert prove(route.schedule(1009)).in_tree_order >= route.is_invariant


@pytest.mark.parametrize(("hosts", "m"), HOSTS)
@pytest.mark.parametrize("num_elements", [0, 1, 15, 16, 100, 1009, 200_003])
def test_the_ranks_of_a_host_add_each_element_once(hosts: int, m: int, num_elements: int) -> None:
    whole = schedule(hosts * m, num_elements, outer=ALGORITHMS["tree"], ranks_per_host=m)
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
        schedule(7, 10, outer=ALGORITHMS["tree"], ranks_per_host=2)
