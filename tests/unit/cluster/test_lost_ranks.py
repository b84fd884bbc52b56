"""Which ranks a launcher lets go: those that rank 0 has given up, and no others; calls that never
return do not hold up who asks, and a thread runs nothing after a task that failed.
"""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from firecaffe.cluster import hosts, lost_ranks
from firecaffe.cluster.calls import SideThread, Worker
from firecaffe.cluster.hosts import ExitAgreement, Rendezvous
from firecaffe.cluster.lost_ranks import (
    TOGETHER,
    LossReader,
    LossReporter,
    ReleasedRanks,
)
from firecaffe.cluster.rank_process import ProcessState, RankFailure
from firecaffe.errors import PeerLostError
from firecaffe.faults import ANOTHER, Fault

RUNS, STOPPED, ENDED = (
    ProcessState(False, False),
    ProcessState(False, True),
    ProcessState(True, False),
)


def failed(code: int, fault: Fault | None = None) -> ProcessState:
    failure = RankFailure(0, 1, code, "")
    failure.fault = fault
    return ProcessState(True, False, failure)


def gone(rank: int) -> Fault:
    return Fault("gone", rank, "host", 7, "rank 0: its connection closed")


class Launcher:
    """A launcher's end, and rank 0's, which meet in a store."""

    def __init__(self, aside: SideThread, attempt: int = 0) -> None:
        self.store = HashStore()
        self.told: list[tuple[int, str, int]] = []
        self.killed: list[int] = []
        reader = LossReader(self.store, attempt)
        self.released = ReleasedRanks(reader, aside, self.on_rank_lost, self.killed.append)

    def on_rank_lost(self, rank: int, fault: Fault | None, failure: RankFailure | None) -> None:
        kind = "" if fault is None else fault.kind
        self.told.append((rank, kind, 0 if failure is None else failure.exitcode))

    def say(self, *faults: Fault, attempt: int = 0, is_over: bool = False) -> LossReporter:
        """What rank 0 has said."""
        teller = LossReporter(self.store, attempt)
        for fault in faults:
            teller.tell(fault)
        if is_over:
            teller.close()
        teller._calls.close(patience_s=60)
        return teller


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with SideThread() as aside:
        yield Launcher(aside)


def test_who_has_ended_first_is_told_of_when_rank_0_has_its_word(launcher: Launcher) -> None:
    teller = launcher.say()
    launcher.released.look({1: failed(-9), 2: RUNS})
    assert (launcher.released.ranks, launcher.told) == ({1}, [])
    teller._store.set("firecaffe/lost/0/0", gone(1).as_text())
    for _ in range(2):
        launcher.released.look({2: RUNS})
    assert launcher.told == [(1, "gone", -9)]
    assert launcher.killed == []


OF_RANK_0 = Fault("killed", 0, "host", 7, "rank 1")
GOES_ALONG = Fault("other", 1, "host", 7, ANOTHER)
LOOKS: dict[str, tuple[list[Fault], dict[int, ProcessState], list[tuple[int, str, int]]]] = {
    "given up and stopped": ([gone(2)], {1: RUNS, 2: STOPPED}, [(2, "gone", 0)]),
    "given up twice": (
        [gone(1), gone(2), gone(1)],
        {1: STOPPED, 2: STOPPED},
        [(1, "gone", 0), (2, "gone", 0)],
    ),
    "rank 0": ([], {0: failed(-9)}, []),
    "for a lost rank 0": ([], {1: failed(10, OF_RANK_0)}, []),
    "for another": ([], {1: failed(8, GOES_ALONG)}, []),
    **{f"with all, by {code}": ([], {1: failed(code)}, []) for code in sorted(TOGETHER)},
}
"""Whom rank 0 has given up, what is seen of ranks, and who goes; who has not ended is killed."""


@pytest.mark.parametrize("case", LOOKS)
def test_who_is_let_go(launcher: Launcher, case: str) -> None:
    faults, seen, told = LOOKS[case]
    launcher.say(*faults)
    launcher.released.look(seen)
    assert launcher.told == told
    assert launcher.released.ranks == {*launcher.killed} == {rank for rank, *_ in told}


def test_who_is_given_up_and_runs_has_time_for_its_last_word(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.say(gone(1))
    launcher.released.look({1: RUNS})
    assert launcher.released.ranks == set()
    monkeypatch.setattr(lost_ranks, "LAST_WORD_S", 0.0)
    launcher.released.look({1: RUNS})
    assert (launcher.killed, launcher.released.ranks) == ([1], {1})


def test_a_loss_told_while_the_launcher_asks_is_let_go(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tells of it, and ends, between the two questions."""

    def read(reader: LossReader) -> None:
        read_now(reader)
        if not reader.given_up:
            launcher.say(gone(1), is_over=True)

    read_now = LossReader.read
    monkeypatch.setattr(LossReader, "read", read)
    launcher.released.look({1: failed(-9)})
    assert launcher.released.ranks == {1}


def test_who_ends_unnoticed_is_told_of_at_the_end(launcher: Launcher) -> None:
    launcher.say()
    launcher.released.look({1: failed(3), 2: ENDED})
    launcher.released.report_rest()
    assert launcher.told == [(1, "", 3)]


def test_nobody_goes_without_a_word_of_rank_0(launcher: Launcher) -> None:
    """Of this attempt. One that rank 0 has given up goes even if rank 0 then needs all again."""
    launcher.released.look({1: failed(-9), 2: STOPPED})
    assert launcher.released.ranks == set()
    launcher.say(gone(1), attempt=1)
    launcher.released.look({1: failed(-9)})
    assert launcher.released.ranks == set()
    launcher.say(gone(1), is_over=True)
    launcher.released.look({1: failed(-9), 2: failed(-9)})
    assert launcher.released.ranks == {1}


def test_a_store_out_of_reach_lets_nobody_go(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> bool:
        raise DistNetworkError("Connection reset by peer")

    launcher.say(gone(1))
    monkeypatch.setattr(LossReader, "read", raises)
    assert launcher.released.look({1: failed(-9)})
    assert launcher.released.ranks == set()


def test_a_store_that_takes_its_time_decides_later(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is busy."""
    answers, read = Event(), LossReader.read

    def waits(reader: LossReader) -> None:
        answers.wait(60)
        read(reader)

    launcher.say(gone(1))
    with monkeypatch.context() as patched:
        patched.setattr(LossReader, "read", waits)
        patched.setattr(lost_ranks, "STORE_S", 0.01)
        assert launcher.released.look({1: RUNS, 0: failed(-9)})
        assert not launcher.released.look({1: failed(-9)})
        patched.setattr(lost_ranks, "PATIENCE_S", 0.0)
        assert launcher.released.look({1: failed(-9)})
        answers.set()
    assert launcher.released.ranks == set()
    while not launcher.released.ranks:
        launcher.released.look({1: failed(-9)})
    assert launcher.told == [(1, "gone", -9)]


def two_hosts(there: set[int]) -> tuple[HashStore, ExitAgreement, ExitAgreement]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    first, second = (ExitAgreement(store, 0, here, lambda: set(there)) for here in (0, 1))
    return store, first, second


def test_hosts_end_together_but_for_one_that_is_gone() -> None:
    there = {0, 1, 2}
    store, first, second = two_hosts(there)
    assert not second.is_done(0)
    there.discard(2)
    store.set("firecaffe/done/0/1", "")
    first.leave()
    assert second.is_done(0)
    assert not second.is_done(2)
    assert not second.is_there(2)


def test_the_host_of_the_store_ends_after_the_last_word_of_the_others() -> None:
    store, first, second = two_hosts({0, 1})
    store.set("firecaffe/done/0/1", "")
    first.leave()
    with ThreadPoolExecutor(1) as beside:
        parted = beside.submit(first.part, True)
        second.leave()
        with pytest.raises(TimeoutError):
            parted.result(0.5)
        second.part(False)
        parted.result(60)


WAIT_S = 300.0


class Cut:
    """A store in torch's rendezvous: it answers, then its link is cut, or its host is gone."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_up = threading.Event()
        self.is_up.set()
        self.is_gone = False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._answer()
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def get(self, key: str) -> bytes:
        self._answer()
        return self.values[key].encode()

    def _answer(self) -> None:
        self.is_up.wait(WAIT_S)
        if self.is_gone:
            raise DistNetworkError("Connection reset by peer")


@pytest.fixture
def asking() -> Iterator[SideThread]:
    with SideThread() as asking:
        yield asking


def test_a_store_out_of_reach_ends_no_ranks(
    asking: SideThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "ANSWER_S", 0.01)
    monkeypatch.setattr(hosts, "LAST_S", 0.01)
    store: Any = Cut()
    backend = C10dRendezvousBackend(store, "m")
    meeting: Rendezvous = Rendezvous.from_backend("m", store, backend, 1, 2, "192.0.2.1")
    meeting.aside = asking
    assert meeting.num_nodes_waiting() == 0
    store.is_up.clear()
    assert meeting.num_nodes_waiting() == 0
    assert not meeting.shutdown()
    store.is_gone = True
    store.is_up.set()
    assert meeting.num_nodes_waiting() == 0
    assert not meeting.shutdown()


class AskedToEndError(Exception):
    """Raised by the handler."""


@pytest.mark.parametrize("whose", ["its own", "another thread's"])
def test_who_waits_hears_signals(asking: SideThread, whose: str) -> None:
    """As a launcher whose store is out of reach, and which is asked to end. A signal that another
    thread gets ends no wait, as one that comes when the wait is about to begin.
    """
    never, is_over = threading.Event(), threading.Event()

    def blocks() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        never.wait(WAIT_S)
        is_over.set()

    def end(*_: object) -> None:
        raise AskedToEndError

    before = signal.signal(signal.SIGUSR2, end)
    masked = {signal.SIGUSR2} if whose == "another thread's" else set()
    signal.pthread_sigmask(signal.SIG_BLOCK, masked)
    try:
        with pytest.raises(AskedToEndError):
            asking.run(blocks)
        assert not is_over.is_set()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, masked)
        signal.signal(signal.SIGUSR2, before)
        never.set()


def test_tasks_run_in_order_and_nothing_runs_after_one_that_failed() -> None:
    done: list[int] = []

    def lose() -> None:
        raise PeerLostError("rank 1 went away")

    worker = Worker("test")
    before = worker.submit(lambda: done.append(1))
    failing = worker.submit(lose)
    after = worker.submit(lambda: done.append(2))
    worker.close()
    before.result()
    for future in (failing, after):
        with pytest.raises(PeerLostError, match="rank 1 went away"):
            future.result()
    assert done == [1]


def test_a_thread_that_cannot_begin_fails_what_it_is_given() -> None:
    def begin() -> None:
        raise OSError("no device")

    worker = Worker("test", begin)
    with pytest.raises(OSError, match="no device"):
        worker.submit(lambda: None).result(timeout=300)
    worker.close()
