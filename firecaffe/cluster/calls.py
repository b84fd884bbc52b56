"""Calls in other threads: those that may block forever, and those made one after the other.

torch's client of a store waits in C++ for its server's answer: 60 s, and if the link to the server
is cut, even until the link is back (torch 2.13). Python runs no signal handler in that time.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between checks for signals: one that comes just before a wait does not end the wait."""


class Calls:
    """A thread that makes calls in the order in which they were put, while the caller continues."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon thread, because a call may never return: the process's exit does not wait for it.
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def put(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def close(self, wait: bool = True, patience_s: float | None = None) -> None:
        """End the thread once its calls have returned; `wait` for that, `patience_s` at most."""
        self._calls.put(None)
        if wait:
            self.thread.join(patience_s)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # it would hold a step's tensors until the next call


class SideThread(Calls):
    """A thread that runs calls one by one; one that never returns blocks those after it."""

    def __init__(self) -> None:
        super().__init__("aside")
        self._overdue: Future[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(wait=False)

    def begin(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call, which starts when those before it have returned."""
        answer: Future[T] = Future()
        self.put(partial(_settle, answer, call))
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


@contextmanager
def repeated(call: Callable[[], object], every_s: float) -> Iterator[None]:
    """Make a call every so many seconds, in another thread, until the block ends."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
