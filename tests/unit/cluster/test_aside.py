"""Calls that never return do not hold up who asks."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from firecaffe.cluster import interruptible
from firecaffe.cluster.interruptible import Aside, PatientRendezvous

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


def rendezvous_of(store: Any) -> DynamicRendezvousHandler:
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        "m", store, C10dRendezvousBackend(store, "m"), 1, 2, "192.0.2.1"
    )
    return handler


@pytest.fixture
def asking() -> Iterator[Aside]:
    with Aside() as asking:
        yield asking


def test_a_store_out_of_reach_ends_no_ranks(asking: Aside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruptible, "ANSWER_S", 0.01)
    monkeypatch.setattr(interruptible, "LAST_S", 0.01)
    store = Cut()
    meeting = PatientRendezvous(rendezvous_of(store), asking)
    assert meeting.num_nodes_waiting() == 0
    store.is_up.clear()
    assert meeting.num_nodes_waiting() == 0
    assert not meeting.shutdown()
    store.is_gone = True
    store.is_up.set()
    assert meeting.num_nodes_waiting() == 0
    assert not meeting.shutdown()


def test_an_answer_and_an_error_are_those_of_the_call(asking: Aside) -> None:
    assert asking.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        asking.run(lambda: 1 // 0)


class AskedToEndError(Exception):
    """Raised by the handler."""


@pytest.mark.parametrize("whose", ["its own", "another thread's"])
def test_who_waits_hears_signals(asking: Aside, whose: str) -> None:
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
