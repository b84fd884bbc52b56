"""A thread that runs tasks one after the other, and that does not delay the process's exit.

`concurrent.futures` joins its threads when the interpreter ends. A thread that waits for a lost
rank would delay the exit until the process group times out.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any, TypeVar

from firecaffe.cluster.calls import Calls
from firecaffe.cluster.group import Group

T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two checks for a lost rank while waiting for a thread."""


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


def wait_for(world: Group, futures: Iterable[Future[Any]], workers: Sequence[Worker]) -> None:
    """Wait for all futures. Raises: PeerLostError, or the error of a worker's task."""
    # A thread that waits for a lost rank may never end, so check the watch and the other workers.
    pending = set(futures)
    while pending:
        world.watch.check()
        pending = wait(pending, POLL_S, FIRST_EXCEPTION).not_done
        raise_failure(workers)


def raise_failure(workers: Sequence[Worker]) -> None:
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
