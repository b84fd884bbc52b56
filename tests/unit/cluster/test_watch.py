"""Ranks that watch over each other, as threads of one process with real sockets between them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from firecaffe.cluster import watch as module
from firecaffe.cluster.watch import BEAT, HEADER, Place, Watch
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault

SILENT_S = 0.6
LONG_S = 300.0


def connect() -> tuple[socket.socket, socket.socket]:
    """Over TCP: what a host has acknowledged is asked of the kernel."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def mesh(size: int) -> list[dict[int, socket.socket]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for first in range(size):
        for second in range(first + 1, size):
            sockets[first][second], sockets[second][first] = connect()
    return sockets


@contextmanager
def watches(
    size: int, watching: range | None = None, silent_s: float = LONG_S, hosts: str = ""
) -> Iterator[tuple[list[Watch], list[dict[int, socket.socket]]]]:
    """Of the first ranks; the others are sockets in the test's hands."""
    sockets = mesh(size)
    names = list(hosts) or [f"host{rank}" for rank in range(size)]
    started = [
        Watch(rank, names, sockets[rank], silent_s, Place()) for rank in watching or range(size)
    ]
    try:
        yield started, sockets
    finally:
        for each in started:
            each.close()
        for of_rank in sockets:
            for one in of_rank.values():
                one.close()


def fault_of(watch: Watch) -> Fault:
    assert watch._known.wait(LONG_S)
    assert watch.fault is not None
    return watch.fault


def until(is_so: Callable[[], bool]) -> None:
    """Looks every few milliseconds."""
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s
        threading.Event().wait(0.005)


def beat(step: int, waits: bool = False) -> bytes:
    return HEADER.pack(BEAT, step, waits, 0, 0)


def keep_beating(
    ends: dict[int, socket.socket], step: int, waits: bool, stop: threading.Event
) -> threading.Thread:
    def run() -> None:
        while not stop.wait(SILENT_S / 8):
            for end in ends.values():
                end.send(beat(step, waits))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


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
        monkeypatch.setattr(module, "_last_acknowledged_s", lambda peer: LONG_S * (peer in lost))
        for watch in watching:
            fault = fault_of(watch)
            assert (fault.kind, fault.rank) == ("unreachable", 2)


def test_a_rank_that_reaches_no_other_host_blames_its_own_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_last_acknowledged_s", lambda _: LONG_S)
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
        until(lambda: module._last_acknowledged_s(near) > 0.1)
        near.send(b"x")
        until(lambda: module._last_acknowledged_s(near) < 0.1)


def test_who_is_behind_is_named_when_a_time_is_over() -> None:
    with watches(3, range(1), LONG_S) as (watching, sockets):
        watch, stop = watching[0], threading.Event()
        watch._beat_s = SILENT_S
        watch.place.step, watch.place.waits = 9, True
        beating = [
            keep_beating(sockets[1], 9, True, stop),
            keep_beating(sockets[2], 9, False, stop),
        ]
        try:
            until(lambda: all(watch._peers[rank].place.step == 9 for rank in (1, 2)))
            fault = watch.verdict(timed_out=True)
        finally:
            stop.set()
            for thread in beating:
                thread.join()
        assert fault is not None
        assert (fault.kind, fault.rank, fault.step) == ("stuck", 2, 9)


def test_nobody_is_named_where_nobody_is_behind() -> None:
    with watches(2, silent_s=SILENT_S) as (watching, _):
        for watch in watching:
            watch.place.step, watch.place.waits = 4, True
        until(lambda: watching[0]._peers[1].place == watching[1].place)
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
        HEADER.pack(BEAT, 1, 0, 0, 1 << 31),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 5000,
    ],
)
def test_noise_on_a_connection_is_no_verdict(noise: bytes) -> None:
    with watches(2, range(1), LONG_S) as (watching, sockets):
        sockets[1][0].send(noise)
        sockets[1][0].send(HEADER.pack(module.FAULT, 1, 0, 0, 4) + b"null")
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
