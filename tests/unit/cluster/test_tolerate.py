"""Rank 0 goes on without ranks that are lost: it hears of each, and the others of none."""

import socket
import threading

import pytest

from firecaffe.cluster.links import Shape, links_of, star_of
from firecaffe.cluster.watch import Watch
from firecaffe.cluster.watch_message import FAULT, WatchedPlace, pack, take_messages
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault
from tests.unit.cluster.watches import LONG_S, SILENT_S, fault_of, until, watches

SIZE = 16
INNER = (1, 3, 7)
"""In a tree, these stand one above the other between rank 0 and rank 15."""


class Losses:
    """What rank 0 is told, in order."""

    def __init__(self, watch: Watch, least: int = 1) -> None:
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


def test_ranks_that_are_lost_together_are_each_told_once() -> None:
    with watches(SIZE, [0, 1, 2], shape=star_of) as (watching, sockets):
        losses = Losses(watching[0], least=SIZE - 3)
        for lost in range(3, SIZE):
            sockets[lost][0].close()
        assert sorted(losses.all()) == [("gone", rank) for rank in range(3, SIZE)]
        assert sorted(watching[0].losses) == list(range(3, SIZE))
        assert watching[1].fault is watching[2].fault is None


def test_each_of_several_silent_ranks_is_told() -> None:
    with watches(4, [0, 1], SILENT_S, shape=star_of) as (watching, _):
        assert sorted(Losses(watching[0], least=2).all()) == [("frozen", 2), ("frozen", 3)]


def test_what_a_lost_rank_says_later_is_no_news() -> None:
    with watches(3, [0], shape=star_of) as (watching, sockets):
        losses = Losses(watching[0], least=2)
        for kind in ("data", "exception"):
            own = Fault(kind, 1, "host1", 5, "itself").as_text().encode()
            sockets[1][0].send(pack(FAULT, WatchedPlace(5), text=own))
        sockets[1][0].close()
        until(lambda: 1 in watching[0].losses)
        sockets[2][0].close()
        assert losses.all() == [("data", 1), ("gone", 2)]


def test_a_silent_rank_is_told_that_it_was_given_up() -> None:
    with watches(3, [0, 1], SILENT_S, shape=star_of) as (watching, sockets):
        assert Losses(watching[0]).all() == [("frozen", 2)]
        assert watching[1].fault is None
        received = bytearray()
        sockets[2][0].settimeout(LONG_S)
        while not (heard := [m for m in take_messages(received) if m.kind == FAULT]):
            received += sockets[2][0].recv(65536)
        fault = Fault.parse(heard[0].text.decode())
        assert (fault.kind, fault.rank) == ("frozen", 2)


def test_a_rank_that_hears_it_was_given_up_ends() -> None:
    with watches(2, shape=star_of) as (watching, _):
        Losses(watching[0])
        watching[0]._decide(Fault("frozen", 1, "host1", 4, "rank 0: silent for 20 s"))
        assert fault_of(watching[1]).rank == 1
        with pytest.raises(PeerLostError, match="rank 1 on host1 froze at step 4") as told:
            watching[1].check()
        assert told.value.exit_code == 11
        assert watching[0].fault is None


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
        until(lambda: watching[1]._neighbours[0].place.waits)
        assert watching[0].verdict(timed_out=True) is None
        watching[0].check()
        assert watching[0].losses == {}


def test_every_loss_is_also_told_for_the_record() -> None:
    with watches(3, [0], shape=star_of) as (watching, sockets):
        told: list[tuple[int, bool]] = []
        watching[0].when_lost(lambda fault, goes_on: told.append((fault.rank, goes_on)))
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
            watching[0].welcome(f"host{rank}", ours)
        comers[1].close()
        assert losses.all() == [("gone", 3)]
        assert watching[0].losses[3].host == "host3"
        comers[0].close()


def test_a_rank_that_comes_while_all_are_told_changes_nothing_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken up in another thread, between two of those that are told."""
    with watches(3, shape=star_of) as (watching, _):
        first = watching[0]._neighbours[1]
        really_send = first.send
        ours, its = socket.socketpair()
        comers = [ours]

        def send(message: bytes) -> None:
            really_send(message)
            # Not in a beat, which is sent by the thread that takes up who comes.
            if threading.current_thread() is threading.main_thread() and comers:
                watching[0].welcome("host3", comers.pop())

        monkeypatch.setattr(first, "send", send)
        watching[0].tell(Fault("exception", 0, "host0", 4, "itself"))
        assert {fault_of(watch).rank for watch in watching[1:]} == {0}
        its.close()
