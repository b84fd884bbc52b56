"""Calls in other threads: those that may block forever, and those made one after the other.

torch's client of a store waits in C++ for its server's answer: 60 s, and if the link to the server
is cut, even until the link is back (torch 2.13). Python runs no signal handler in that time.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

T = TypeVar("T")

ANSWER_S = 1.0
"""Seconds to wait for an answer that the caller can do without."""

POLL_S = 0.5
"""Seconds between checks for signals: one that comes just before a wait does not end the wait."""

LAST_S = 5.0
"""Seconds for the last questions of a launch, once its ranks have ended."""


class SideThread:
    """A thread that runs calls one by one; one that never returns blocks those after it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None
        # A daemon thread, so that the process's exit does not wait for it.
        threading.Thread(target=self._serve, name="aside", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread once its calls have returned; do not wait for that."""
        self._calls.put(None)

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call, which starts when those before it have returned."""
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        return answer

    def run(self, call: Callable[[], T], patience_s: float | None = None) -> T:
        """Return what the call returns, or raise its error.

        Raises: TimeoutError if it does not return in time; at once if an earlier call is overdue.
        """
        if self._overdue is not None and not self._overdue.done():
            raise TimeoutError("no answer yet")
        answer = self.begin(call)
        until_s = math.inf if patience_s is None else time.monotonic() + patience_s
        while not answer.done():
            if (left_s := until_s - time.monotonic()) <= 0:
                self._overdue = answer
                raise TimeoutError(f"no answer in {patience_s:g} s")
            wait([answer], min(left_s, POLL_S))
        return answer.result()

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)


def participants(met: DynamicRendezvousHandler) -> dict[Any, int]:
    """Return the number of each host that has joined (`addr`), as of the store's last query."""
    return met._state_holder.state.participants  # torch (2.13) has no public name for them


class PatientRendezvous(RendezvousHandler):
    """A rendezvous whose store may be out of reach; running ranks are not ended for that."""

    def __init__(self, inner: DynamicRendezvousHandler, aside: SideThread) -> None:
        self.inner, self.aside = inner, aside
        self._asked: Future[int] | None = None  # a pending query for the hosts that wait

    def num_nodes_waiting(self) -> int:
        """Return the number of hosts that wait to join; 0 while the store does not answer."""
        if self._asked is None:
            self._asked = self.aside.begin(self.inner.num_nodes_waiting)
        if not wait([self._asked], ANSWER_S).done:
            return 0
        answer, self._asked = self._asked, None
        return answer.result() if answer.exception() is None else 0  # the store is gone

    def hosts_there(self) -> set[int]:
        """Return the numbers of hosts with a recent sign of life; call it by `SideThread.run`."""
        self.inner.is_closed()  # asks the store for the state
        return set(participants(self.inner).values())

    def shutdown(self) -> bool:
        """Close the rendezvous for all hosts; return False if the store does not answer."""
        try:
            return self.aside.run(self.inner.shutdown, LAST_S)
        except Exception:
            return False

    # The next three are to be called by `SideThread.run`.

    def next_rendezvous(self) -> RendezvousInfo:
        return self.inner.next_rendezvous()

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def get_backend(self) -> str:
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self.inner.use_agent_store

    def get_run_id(self) -> str:
        return self.inner.get_run_id()


class Calls:
    """A thread that makes calls in the order in which they were put, while the caller continues."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon thread, because a call may wait for a disk that has stalled.
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._waiting.put(call)

    def close(self, patience_s: float) -> None:
        """Wait at most `patience_s` seconds until all calls have returned, and end the thread."""
        self._waiting.put(None)
        self._thread.join(patience_s)

    def _make(self) -> None:
        while (call := self._waiting.get()) is not None:
            call()
