"""Forty ranks on five hosts: whatever happens to one of them, all others come to hear the same."""

import pytest

from firecaffe.cluster.links import links_of
from firecaffe.cluster.watch import Watch
from firecaffe.faults import Fault
from tests.unit.cluster.watches import fault_of, until, watches

HOSTS = [f"host{rank // 8}" for rank in range(40)]
SILENT_S = 1.0
ROOT, INNER_WATCHER, INNER_ON_HOST, LEAF = 0, 8, 9, 39


def told_by(watching: list[Watch]) -> set[tuple[str, int, str, int]]:
    faults = [fault_of(watch) for watch in watching]
    return {(fault.kind, fault.rank, fault.host, fault.step) for fault in faults}


@pytest.mark.parametrize("lost", [ROOT, INNER_WATCHER, INNER_ON_HOST, LEAF])
def test_a_rank_that_dies_is_named_to_all(lost: int) -> None:
    others = [rank for rank in range(40) if rank != lost]
    with watches(40, others, hosts=HOSTS) as (watching, sockets):
        for watch in watching:
            watch.place.step = 4
        for end in sockets[lost].values():
            end.close()
        assert told_by(watching) == {("gone", lost, HOSTS[lost], 4)}


@pytest.mark.parametrize("lost", [INNER_WATCHER, INNER_ON_HOST])
def test_a_rank_that_falls_silent_is_named_to_all(lost: int) -> None:
    others = [rank for rank in range(40) if rank != lost]
    with watches(40, others, SILENT_S, HOSTS) as (watching, _):
        assert told_by(watching) == {("frozen", lost, HOSTS[lost], 0)}


@pytest.mark.parametrize("dumb", [ROOT, INNER_WATCHER, LEAF])
def test_what_one_says_of_itself_reaches_all(dumb: int) -> None:
    """Also around a watcher that passes nothing on for now, as one that holds the interpreter's
    lock; but not those who have no other link.
    """
    own = Fault("data", 25, HOSTS[25], 5, "itself", "the data end here")
    hearing = [rank for rank in range(40) if rank not in (dumb, 25)]
    if dumb in (ROOT, INNER_WATCHER):
        hearing = [rank for rank in hearing if HOSTS[rank] != HOSTS[dumb]]
    with watches(40, {*range(40)} - {dumb}, hosts=HOSTS) as (watching, _):
        by_rank = {watch.rank: watch for watch in watching}
        by_rank[25].tell(own)
        assert all(fault_of(by_rank[rank]) == own for rank in hearing)


def test_the_rank_for_which_all_wait_is_known_to_all() -> None:
    with watches(40, silent_s=SILENT_S, hosts=HOSTS) as (watching, _):
        for watch in watching:
            watch.place.step, watch.place.waits = 7, watch.rank != 30
        judge = watching[17]._judge  # neither has a link with the other's host
        assert not {HOSTS[rank] for rank in links_of(16, HOSTS).ranks} & {HOSTS[30]}
        until(lambda: judge.furthest_behind(without=17) == (7, False, 30))
        watching[17].verdict(timed_out=True)
        assert told_by(watching) == {("stuck", 30, HOSTS[30], 7)}


def test_all_know_that_one_has_left() -> None:
    with watches(40, hosts=HOSTS) as (watching, _):
        watching[LEAF].close()
        until(lambda: all(watch._has_one_left for watch in watching if watch.rank != LEAF))
        assert not any(watch.fault for watch in watching)
