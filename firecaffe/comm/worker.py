"""A thread that does one thing after the other, and that no process waits for at its end.

`concurrent.futures` joins its threads when the interpreter ends; one that waits for a lost rank
would hold the process up until the process group's time is over.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs what is submitted, in order, in a thread of its own."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        """begin: called by the thread before anything else."""
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(begin,), name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Its result, or its exception, once it was its turn."""
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def close(self, wait: bool = True) -> None:
        """Ends the thread after what was submitted. wait: for that."""
        self._tasks.put(None)
        if wait:
            self._thread.join()

    def _run(self, begin: Callable[[], None]) -> None:
        begin()
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            # Not until the next one: it may hold a step's tensors.
            del future, task, item
