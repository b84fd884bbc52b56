"""Counts the bytes of gradients that a rank sends, as they are handed to the network."""

from threading import Lock


class Traffic:
    """Counts bytes sent to other ranks. Threads may count at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sent_bytes = 0
        self._is_known = True

    def add(self, sent_bytes: int) -> None:
        with self._lock:
            self._sent_bytes += sent_bytes

    def add_unknown(self) -> None:
        """Notes a collective of the backend's, of which nobody knows the messages."""
        self._is_known = False

    @property
    def sent_bytes(self) -> int | None:
        """Bytes sent so far; None if some of them are not known."""
        return self._sent_bytes if self._is_known else None
