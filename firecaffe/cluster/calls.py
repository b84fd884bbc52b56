"""Calls that are made one after the other in a thread of their own."""

import queue
import threading
from collections.abc import Callable


class Calls:
    """A thread that makes calls in the order in which they were put: whoever puts one goes on."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon: a call may wait for a disk that has stalled.
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Lets a call be made when those before it have returned."""
        self._waiting.put(call)

    def close(self, patience_s: float) -> None:
        """Waits, for so long, until all calls have returned; puts an end to the thread."""
        self._waiting.put(None)
        self._thread.join(patience_s)

    def _make(self) -> None:
        while (call := self._waiting.get()) is not None:
            call()
