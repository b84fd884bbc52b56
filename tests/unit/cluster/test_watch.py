"""Ranks that watch over each other, as threads of one process with real sockets between them; forty
on five hosts, of whom all come to hear the same.
"""

import time

import pytest

from firecaffe.cluster.links import Neighbour, links_of
from firecaffe.cluster.watch import Watch
from firecaffe.cluster.watch_message import BEAT, FAULT, HEADER, NOBODY, WatchedPlace, pack
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault
from tests.unit.cluster.watches import LONG_S, SILENT_S, connect, fault_of, until, watches


def test_a_closed_connection_is_a_rank_that_is_gone() -> None:
    with watches(4, range(3)) as (watching, sockets):
        for watch in watching:
            watch.place.step = 7
        for end in sockets[3].values():
            end.close()
        for watch in watching:
            fault = fault_of(watch)
            assert (fault.kind, fault.rank, fault.host, fault.step) == ("gone", 3, "host3", 7)
            with pytest.raises(PeerLostError, match="rank 3 on host3 went away at step 7") as told:
                watch.check()
            assert (told.value.rank, told.value.kind, told.value.exit_code) == (3, "gone", 9)


def test_whoever_says_goodbye_is_not_lost() -> None:
    with watches(3, silent_s=SILENT_S) as (watching, _):
        watching[2].close()
        assert not watching[0]._known.wait(2 * SILENT_S)
        assert watching[1].fault is None


def test_a_silent_rank_whose_host_answers_is_frozen() -> None:
    with watches(3, range(2), SILENT_S) as (watching, _):
        for watch in watching:
            fault = fault_of(watch)
            assert (fault.kind, fault.rank) == ("frozen", 2)
            assert "silent for 1 s, while its host answers" in fault.seen


def test_a_silent_rank_whose_host_does_not_answer_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watches(3, range(2), SILENT_S) as (watching, sockets):
        lost = [sockets[rank][2] for rank in range(2)]
        monkeypatch.setattr(
            Neighbour, "last_acknowledged_s", lambda each: LONG_S * (each.socket in lost)
        )
        for watch in watching:
            fault = fault_of(watch)
            assert (fault.kind, fault.rank) == ("unreachable", 2)


def test_a_rank_that_reaches_no_other_host_blames_its_own_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Neighbour, "last_acknowledged_s", lambda _: LONG_S)
    with watches(4, range(1), SILENT_S) as (watching, _):
        fault = fault_of(watching[0])
        assert (fault.kind, fault.rank) == ("unreachable", 0)
        assert fault.seen == "itself: 3 of 3 other hosts do not answer"
    # But not where there is only one other host: nobody knows which end is cut.
    with watches(4, range(1), SILENT_S, "aabb") as (watching, _):
        fault = fault_of(watching[0])
        assert (fault.kind, fault.rank, fault.host) == ("unreachable", 1, "a")


def test_a_host_answers_for_a_process_that_reads_nothing() -> None:
    near, far = connect()
    with near, far:
        host = Neighbour(near, 0.0)
        until(lambda: host.last_acknowledged_s() > 0.1)
        host.send(b"x")
        until(lambda: host.last_acknowledged_s() < 0.1)


def test_who_is_behind_is_named_when_a_time_is_over() -> None:
    with watches(7, silent_s=SILENT_S) as (watching, _):
        for watch in watching:
            watch.place.step, watch.place.waits = 9, watch.rank != 5
        # 3 and 5 have no link, nor have their parents.
        judge = watching[3]._judge
        until(lambda: judge.furthest_behind(without=3) == (9, False, 5))
        fault = watching[3].verdict(timed_out=True)
        assert fault is not None
        assert (fault.kind, fault.rank, fault.step) == ("stuck", 5, 9)
        assert all(fault_of(watch) == fault for watch in watching)


def test_a_wait_that_the_process_group_does_not_end_is_over_in_time() -> None:
    with watches(2, silent_s=SILENT_S, timeout_s=SILENT_S) as (watching, _):
        watching[0].place.step = watching[1].place.step = 3
        watching[0].place.waits_from_s = time.monotonic()
        watching[0].place.waits = True
        fault = fault_of(watching[0])
        assert (fault.kind, fault.rank, fault.step) == ("stuck", 1, 3)


def test_nobody_is_named_where_nobody_is_behind() -> None:
    with watches(2, silent_s=SILENT_S) as (watching, _):
        for watch in watching:
            watch.place.step, watch.place.waits = 4, True
        until(lambda: watching[0]._neighbours[1].furthest_behind == (4, True, 1))
        assert watching[0].verdict(timed_out=True) is None


def test_what_a_rank_says_of_itself_is_what_all_say() -> None:
    own = Fault("data", 2, "host2", 5, "itself", "the data end here")
    with watches(3) as (watching, _):
        watching[2].tell(own)
        watching[2].close()
        assert [fault_of(watch) for watch in watching[:2]] == [own, own]
        assert watching[2].fault is None


def test_the_first_verdict_stays() -> None:
    first = Fault("data", 2, "host2", 5, "itself")
    with watches(3) as (watching, _):
        watching[2].tell(first)
        assert fault_of(watching[0]) == first
        watching[1].tell(Fault("exception", 1, "host1", 5, "itself"))
        watching[1].close()
        assert fault_of(watching[0]) == first


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\xff" * 100,
        HEADER.pack(BEAT, 1, False, 0, False, NOBODY, 0, 0, 1 << 31),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 5000,
    ],
)
def test_noise_on_a_connection_is_no_verdict(noise: bytes) -> None:
    with watches(2, range(1), LONG_S) as (watching, sockets):
        sockets[1][0].send(noise)
        sockets[1][0].send(pack(FAULT, WatchedPlace(1), text=b"null"))
        assert not watching[0]._known.wait(0.3)
        sockets[1][0].close()
        assert fault_of(watching[0]).kind == "gone"


def test_round_trips_are_measured() -> None:
    with watches(2, silent_s=SILENT_S) as (watching, _):
        watching[0].place.step = 3
        until(lambda: len(watching[0]._round_trips) >= 2)
        trips = watching[0].take_round_trips()
        assert {trip.peer for trip in trips} == {1}
        assert all(0 < trip.round_trip_s < LONG_S for trip in trips)
        assert trips[-1].step == 3


HOSTS = [f"host{rank // 8}" for rank in range(40)]
MANY_SILENT_S = 1.0
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
    with watches(40, others, MANY_SILENT_S, HOSTS) as (watching, _):
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
    with watches(40, silent_s=MANY_SILENT_S, hosts=HOSTS) as (watching, _):
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
