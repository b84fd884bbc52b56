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

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between checks for signals: one that comes just before a wait does not end the wait."""


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
