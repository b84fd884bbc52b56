"""Calls that may block for ever, in a thread beside: who asks goes on, and hears signals.

torch's client of a store waits in C++ for its server's answer: 60 s, and after that, if the link to
the server is cut, until it is back (torch 2.13). No signal handler of Python's runs in that time.
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
"""Seconds for an answer to who need not have one."""

LOOK_S = 0.5
"""Seconds between two looks for signals of who waits for an answer: one that comes as a wait
begins, or to another thread, does not end it.
"""

LAST_S = 5.0
"""Seconds for the last questions of a launch, once its ranks have ended."""


class Aside:
    """Runs calls one after the other in a thread of its own. One that never returns is left
    behind, with those after it.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None
        # A daemon: the end of the process does not wait for it.
        threading.Thread(target=self._serve, name="aside", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread when its calls have returned; does not wait for that."""
        self._calls.put(None)

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Begins a call when those before it have returned."""
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        return answer

    def run(self, call: Callable[[], T], patience_s: float | None = None) -> T:
        """Returns what the call returns; its error is raised here.

        Raises: TimeoutError if it has not returned in time; at once if an earlier one of which that
        is so has not returned yet.
        """
        if self._overdue is not None and not self._overdue.done():
            raise TimeoutError("no answer yet")
        answer = self.begin(call)
        until_s = math.inf if patience_s is None else time.monotonic() + patience_s
        while not answer.done():
            if (left_s := until_s - time.monotonic()) <= 0:
                self._overdue = answer
                raise TimeoutError(f"no answer in {patience_s:g} s")
            wait([answer], min(left_s, LOOK_S))
        return answer.result()

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)


def participants(met: DynamicRendezvousHandler) -> dict[Any, int]:
    """The hosts that have come, as torch knows them (`addr`), each with its number; as far as the
    store was last asked. torch (2.13) has no public word for them.
    """
    return met._state_holder.state.participants


class PatientRendezvous(RendezvousHandler):
    """Another rendezvous, whose store may be out of reach. Ranks that run are not ended for it:
    they know by themselves who is lost.
    """

    def __init__(self, inner: DynamicRendezvousHandler, aside: Aside) -> None:
        self.inner, self.aside = inner, aside
        self._asked: Future[int] | None = None
        """The question how many hosts wait, if it is not answered yet."""

    def num_nodes_waiting(self) -> int:
        """The hosts that wait to be let in; 0 as long as nobody knows."""
        if self._asked is None:
            self._asked = self.aside.begin(self.inner.num_nodes_waiting)
        if not wait([self._asked], ANSWER_S).done:
            return 0
        answer, self._asked = self._asked, None
        return answer.result() if answer.exception() is None else 0  # the store is gone

    def hosts_there(self) -> set[int]:
        """The numbers of the hosts that take part and were heard of lately; to be called aside."""
        self.inner.is_closed()  # which asks the store for the state
        return set(participants(self.inner).values())

    def shutdown(self) -> bool:
        """Closes the rendezvous for all; False if the store does not answer."""
        try:
            return self.aside.run(self.inner.shutdown, LAST_S)
        except Exception:
            return False

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class; to be called aside."""
        return self.inner.next_rendezvous()

    def is_closed(self) -> bool:
        """See base class; to be called aside."""
        return self.inner.is_closed()

    def set_closed(self) -> None:
        """See base class; to be called aside."""
        self.inner.set_closed()

    def get_backend(self) -> str:
        """See base class."""
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return self.inner.use_agent_store

    def get_run_id(self) -> str:
        """See base class."""
        return self.inner.get_run_id()
