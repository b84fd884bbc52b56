"""Ranks that watch over each other, as threads of one process with real sockets between them; forty
on five hosts, of whom all come to hear the same. Rank 0 goes on without ranks that are lost: it
hears of each, and the others of none.
"""

import re
import socket
import threading

import pytest

from firecaffe.cluster.links import Shape, links_of, star_of
from firecaffe.cluster.neighbors import BEAT, FAULT, HEADER, NOBODY, Neighbor, RankProgress, pack
from firecaffe.cluster.watch import PeerWatch
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault
from tests.unit.cluster.watches import LONG_S, SILENT_S, connect, fault_of, until, watches


def test_whoever_says_goodbye_is_not_lost_and_all_know_that_one_has_left() -> None:
    with watches(5, silent_s=SILENT_S) as (watching, _):
        watching[4].close()
        until(lambda: all(watch._saw_goodbye for watch in watching[:4]))
        assert not watching[0]._known.wait(2 * SILENT_S)
        assert not any(watch.fault for watch in watching)


def test_a_silent_rank_whose_host_does_not_answer_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watches(3, range(2), SILENT_S) as (watching, sockets):
        lost = [sockets[rank][2] for rank in range(2)]
        monkeypatch.setattr(
            Neighbor, "last_acknowledged_s", lambda each: LONG_S * (each.socket in lost)
        )
        for watch in watching:
            fault = fault_of(watch)
            assert (fault.kind, fault.rank) == ("unreachable", 2)


def test_a_rank_that_reaches_no_other_host_blames_its_own_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Neighbor, "last_acknowledged_s", lambda _: LONG_S)
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
        host = Neighbor(near, 0.0)
        until(lambda: host.last_acknowledged_s() > 0.1)
        host.send(b"x")
        until(lambda: host.last_acknowledged_s() < 0.1)


def test_nobody_is_named_where_nobody_is_behind() -> None:
    with watches(2, silent_s=SILENT_S) as (watching, _):
        for watch in watching:
            watch.place.step, watch.place.waits = 4, True
        until(lambda: watching[0]._neighbors[1].furthest_behind == (4, True, 1))
        assert watching[0].verdict(timed_out=True) is None


def test_the_first_verdict_stays() -> None:
    first = Fault("data", 2, "host2", 5, "itself")
    with watches(3) as (watching, _):
        watching[2].tell(first)
        assert fault_of(watching[0]) == first
        watching[1].tell(Fault("exception", 1, "host1", 5, "itself"))
        watching[1].close()
        assert fault_of(watching[0]) == first


NOISE = [
    b"",
    b"\xff" * 100,
    HEADER.pack(BEAT, 1, False, 0, False, NOBODY, 0, 0, 1 << 31),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 5000,
]


def test_noise_on_a_connection_is_no_verdict() -> None:
    """Each of the other ranks makes another noise."""
    with watches(6, range(1), LONG_S, shape=star_of) as (watching, sockets):
        for rank, noise in enumerate(NOISE, 1):
            sockets[rank][0].send(noise)
            sockets[rank][0].send(pack(FAULT, RankProgress(1), text=b"null"))
        assert not watching[0]._known.wait(0.3)
        sockets[2][0].close()
        assert (fault_of(watching[0]).kind, fault_of(watching[0]).rank) == ("gone", 2)


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


def told_by(watching: list[PeerWatch]) -> set[tuple[str, int, str, int]]:
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
        with pytest.raises(PeerLostError, match=f"rank {lost} on .* at step 4") as told:
            watching[0].check()
        assert (told.value.rank, told.value.kind, told.value.exit_code) == (lost, "gone", 9)


@pytest.mark.parametrize("lost", [INNER_WATCHER, INNER_ON_HOST])
def test_a_rank_that_falls_silent_is_named_to_all(lost: int) -> None:
    others = [rank for rank in range(40) if rank != lost]
    with watches(40, others, MANY_SILENT_S, HOSTS) as (watching, _):
        assert told_by(watching) == {("frozen", lost, HOSTS[lost], 0)}
        assert re.search(r"silent for \d s, while its host answers", fault_of(watching[0]).seen)


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


SIZE = 16
INNER = (1, 3, 7)
"""In a tree, these stand one above the other between rank 0 and rank 15."""


class Losses:
    """What rank 0 is told, in order."""

    def __init__(self, watch: PeerWatch, least: int = 1) -> None:
        self.told: list[Fault] = []
        self.least = least
        self.are_all = threading.Event()
        watch.tolerate(self.take)

    def take(self, fault: Fault) -> None:
        self.told.append(fault)
        if len(self.told) == self.least:
            self.are_all.set()

    def all(self) -> list[tuple[str, int]]:
        assert self.are_all.wait(LONG_S)
        return [(fault.kind, fault.rank) for fault in self.told]


def test_rank_0_hears_of_every_loss_and_nobody_is_cut_off() -> None:
    others = [rank for rank in range(SIZE) if rank not in INNER]
    with watches(SIZE, others, shape=star_of) as (watching, sockets):
        losses = Losses(watching[0], least=len(INNER) + 1)
        for lost in INNER:
            sockets[lost][0].close()
            until(lambda lost=lost: lost in watching[0].losses)  # type: ignore[misc]
        watching[-1].tell(Fault("data", 15, "host15", 3, "itself"))
        watching[-1].close()
        assert losses.all() == [*(("gone", rank) for rank in INNER), ("data", 15)]
        assert watching[0].fault is None
        watching[0].check()
        assert not any(watch.fault for watch in watching)
        # Then rank 0 is lost: that is news for all who are left.
        watching[0].tell(Fault("exception", 0, "host0", 4, "itself"))
        assert {fault_of(watch).rank for watch in watching[1:-1]} == {0}


def test_what_a_lost_rank_says_later_is_no_news() -> None:
    with watches(3, [0], shape=star_of) as (watching, sockets):
        losses = Losses(watching[0], least=2)
        for kind in ("data", "exception"):
            own = Fault(kind, 1, "host1", 5, "itself").as_text().encode()
            sockets[1][0].send(pack(FAULT, RankProgress(5), text=own))
        sockets[1][0].close()
        until(lambda: 1 in watching[0].losses)
        sockets[2][0].close()
        assert losses.all() == [("data", 1), ("gone", 2)]


def test_a_verdict_on_rank_0_ends_rank_0_and_all() -> None:
    with watches(4, shape=star_of) as (watching, _):
        losses = Losses(watching[0])
        watching[2]._decide(Fault("unreachable", 0, "host0", 4, "rank 2: silent for 20 s"))
        assert {fault_of(watch).rank for watch in watching} == {0}
        assert losses.told == []


def test_who_has_said_goodbye_is_not_lost() -> None:
    with watches(3, silent_s=SILENT_S, shape=star_of) as (watching, _):
        losses = Losses(watching[0])
        watching[1].close()
        watching[2].tell(Fault("exception", 2, "host2", 4, "itself"))
        watching[2].close()
        assert losses.all() == [("exception", 2)]


def test_a_rank_that_serves_others_waits_for_none_of_them() -> None:
    """A worker may compute for longer than the time-out."""
    with watches(2, silent_s=SILENT_S, timeout_s=SILENT_S, shape=star_of) as (watching, _):
        Losses(watching[0])
        place = watching[0].place
        place.step, place.waits, place.waits_from_s = 3, True, 0.0
        until(lambda: watching[1]._neighbors[0].place.waits)
        assert watching[0].verdict(timed_out=True) is None
        watching[0].check()
        assert watching[0].losses == {}


def test_every_loss_is_also_told_for_the_record() -> None:
    with watches(3, [0], shape=star_of) as (watching, sockets):
        told: list[tuple[int, bool]] = []
        watching[0].on_verdict(lambda fault, goes_on: told.append((fault.rank, goes_on)))
        Losses(watching[0])
        for lost in (1, 2):
            sockets[lost][0].close()
        until(lambda: len(told) == 2)
        watching[0]._decide(Fault("unreachable", 0, "host0", 4, "itself"))
        until(lambda: len(told) == 3)
        assert sorted(told[:2]) == [(1, True), (2, True)]
        assert told[2] == (0, False)


def test_a_verdict_before_it_stands() -> None:
    with watches(3, shape=star_of) as (watching, _):
        watching[2].tell(Fault("exception", 2, "host2", 4, "itself"))
        assert fault_of(watching[0]).rank == 2
        losses = Losses(watching[0])
        assert losses.told == []
        with pytest.raises(PeerLostError):
            watching[0].check()


@pytest.mark.parametrize(("rank", "shape"), [(0, links_of), (1, star_of)])
def test_only_rank_0_and_if_the_others_do_not_watch_each_other(rank: int, shape: Shape) -> None:
    with (
        watches(3, [rank], shape=shape) as (watching, _),
        pytest.raises(ValueError, match="cannot go on without others"),
    ):
        watching[0].tolerate(lambda _: None)


def test_a_rank_that_comes_is_watched_over_too() -> None:
    with watches(2, shape=star_of) as (watching, _):
        losses = Losses(watching[0])
        comers = []
        for rank in (2, 3):
            ours, its = socket.socketpair()
            comers.append(its)
            watching[0].add_rank(f"host{rank}", ours)
        comers[1].close()
        assert losses.all() == [("gone", 3)]
        assert watching[0].losses[3].host == "host3"
        comers[0].close()


def test_a_rank_that_comes_while_all_are_told_changes_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken up in another thread, between two of those that are told."""
    with watches(3, shape=star_of) as (watching, _):
        first = watching[0]._neighbors[1]
        really_send = first.send
        ours, its = socket.socketpair()
        comers = [ours]

        def send(message: bytes) -> None:
            really_send(message)
            # Not in a beat, which is sent by the thread that takes up who comes.
            if threading.current_thread() is threading.main_thread() and comers:
                watching[0].add_rank("host3", comers.pop())

        monkeypatch.setattr(first, "send", send)
        watching[0].tell(Fault("exception", 0, "host0", 4, "itself"))
        assert {fault_of(watch).rank for watch in watching[1:]} == {0}
        its.close()
