"""A thread that makes calls one after the other."""

import queue
import threading
from collections.abc import Callable


class Calls:
    """A thread that makes calls in the order in which they were put, while the caller continues."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon: a call may wait for a disk that has stalled.
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
