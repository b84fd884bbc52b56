"""A thread that runs one task after the other, and that no process waits for at its end.

`concurrent.futures` joins its threads when the interpreter ends; one that waits for a lost rank
would hold the process up until the process group's time is over.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from firecaffe.cluster.group import Group

T = TypeVar("T")

LOOK_S = 0.1
"""Seconds between two looks of who waits for a thread whether a rank is lost."""


class Worker:
    """Runs what is submitted, in order, in a thread of its own, until something fails.

    After that nothing is run: it would send to ranks that still wait for what has failed, and these
    would take it for that (Gloo ends a process that gets more bytes than it has room for).
    """

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """begin: a function that the thread calls first."""
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.failure: BaseException | None = None
        """The first error in the thread; None if nothing has failed."""
        self._last: Future[Any] | None = None
        self.thread = threading.Thread(target=self._run, args=(begin,), name=name, daemon=True)
        self.thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Submits a task. The future has its result or error, or the error of a task that failed
        before it.
        """
        self._last = future = Future[T]()
        self._tasks.put((future, task))
        return future

    def run_here(self, task: Callable[[], T]) -> Future[T]:
        """Does as `submit`, but in the calling thread, after all that this one has submitted."""
        if self._last is not None:
            wait([self._last])
            self._last = None
        future = Future[T]()
        self._do(future, task)
        return future

    def close(self, wait: bool = True) -> None:
        """Ends the thread after what was submitted. wait: whether to wait for that."""
        self._tasks.put(None)
        if wait:
            self.thread.join()

    def _run(self, begin: Callable[[], None]) -> None:
        try:
            begin()
        except BaseException as error:
            self.failure = error
        while (item := self._tasks.get()) is not None:
            self._do(*item)
            # Not until the next one: it may hold a step's tensors.
            del item

    def _do(self, future: Future[T], task: Callable[[], T]) -> None:
        try:
            if self.failure is not None:
                raise self.failure
            future.set_result(task())
        except BaseException as error:
            self.failure = error
            future.set_exception(error)


def wait_for(world: Group, futures: Iterable[Future[Any]], workers: Sequence[Worker]) -> None:
    """Waits until all of the futures are done. A thread that waits for a lost rank may never end:
    then the watch tells, and the error that another of the workers has met is raised at once.

    Raises: PeerLostError; what a worker has met.
    """
    pending = set(futures)
    while pending:
        if world.watch is not None:
            world.watch.check()
        timeout_s = None if world.watch is None else LOOK_S
        pending = wait(pending, timeout_s, FIRST_EXCEPTION).not_done
        raise_failure(workers)


def raise_failure(workers: Sequence[Worker]) -> None:
    """Raises the error that one of the threads has met, if any."""
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
