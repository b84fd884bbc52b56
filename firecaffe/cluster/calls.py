"""Calls in other threads: those that may block forever, and those made one after the other.

`concurrent.futures` joins its threads when the interpreter ends, where a thread that waits for a
lost rank would delay the exit until the process group times out. These threads are daemons.

torch's client of a store waits in C++ for its server's answer: 60 s, and if the link to the server
is cut, even until the link is back (torch 2.13). Python runs no signal handler in that time.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between checks for signals: one that comes just before a wait does not end the wait."""

LOST_POLL_S = 0.1
"""Seconds between two checks for a lost rank while waiting for a thread."""


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

    @property
    def is_overdue(self) -> bool:
        """Whether a call has not returned in its time yet."""
        return self._overdue is not None and not self._overdue.done()

    def catch_up(self, patience_s: float) -> None:
        """Wait, `patience_s` at most, for a call that is overdue."""
        until_s = time.monotonic() + patience_s
        while self.is_overdue and (left_s := until_s - time.monotonic()) > 0:
            assert self._overdue is not None
            wait([self._overdue], min(left_s, POLL_S))

    def run(self, call: Callable[[], T], patience_s: float | None = None) -> T:
        """Return what the call returns, or raise its error.

        Raises: TimeoutError if it does not return in time; at once if an earlier call is overdue.
        """
        if self.is_overdue:
            raise TimeoutError("no answer yet")
        answer = self.begin(call)
        until_s = math.inf if patience_s is None else time.monotonic() + patience_s
        while not answer.done():
            if (left_s := until_s - time.monotonic()) <= 0:
                self._overdue = answer
                raise TimeoutError(f"no answer in {patience_s:g} s")
            wait([answer], min(left_s, POLL_S))
        return answer.result()


class Worker(Calls):
    """Runs submitted tasks in order, in another thread, until one fails."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self.failure: BaseException | None = None
        """The first error in the thread."""
        self._last: Future[Any] | None = None
        self._begin = begin
        super().__init__(name)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Submit a task. Its future gets its result or error, or the error of an earlier task."""
        self._last = future = Future[T]()
        self.put(partial(self._do, future, task))
        return future

    def run_here(self, task: Callable[[], T]) -> Future[T]:
        """Run a task in the calling thread, after all that it has submitted."""
        if self._last is not None:
            wait([self._last])
            self._last = None
        future = Future[T]()
        self._do(future, task)
        return future

    def _serve(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            self.failure = error
        super()._serve()

    def _do(self, future: Future[T], task: Callable[[], T]) -> None:
        try:
            # After a failed task, other ranks still wait for its messages. They would mistake a
            # later task's messages for them (Gloo ends a process that gets too many bytes).
            if self.failure is not None:
                raise self.failure
            future.set_result(task())
        except BaseException as error:
            self.failure = error
            future.set_exception(error)


def wait_for(
    futures: Iterable[Future[Any]], workers: Sequence[Worker], check: Callable[[], object]
) -> None:
    """Wait for all futures. Raises: the error of a worker's task, or of `check` for a lost rank."""
    # A thread that waits for a lost rank may never end, so check the watch and the other workers.
    pending = set(futures)
    while pending:
        check()
        pending = wait(pending, LOST_POLL_S, FIRST_EXCEPTION).not_done
        raise_failure(workers)


def raise_failure(workers: Sequence[Worker]) -> None:
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure


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
