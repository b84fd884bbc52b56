"""Counts the bytes that a rank sends in a training's steps, as they are handed to the network."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class Traffic:
    """Counts bytes sent to other ranks. Threads may count at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts = True
        self.begin()

    def begin(self) -> None:
        """Begins at 0."""
        self._sent_bytes = 0
        self._is_known = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Counts nothing in a `with` block, in which no thread of a step sends."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def add(self, sent_bytes: int) -> None:
        if self._counts:
            with self._lock:
                self._sent_bytes += sent_bytes

    def add_unknown(self) -> None:
        """Notes a collective of the backend's, of which nobody knows the messages."""
        if self._counts:
            self._is_known = False

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent so far; None if some of them are not known."""
        return self._sent_bytes if self._is_known else None
