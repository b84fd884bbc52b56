"""What one rank sends of the gradients: counted where bytes are handed to the network."""

from threading import Lock


class Traffic:
    """Bytes to other ranks so far. Threads may count at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sent_bytes = 0
        self._is_known = True

    def add(self, sent_bytes: int) -> None:
        with self._lock:
            self._sent_bytes += sent_bytes

    def add_unknown(self) -> None:
        """What went through a collective of the backend's, whose messages nobody tells."""
        self._is_known = False

    @property
    def sent_bytes(self) -> int | None:
        """None where some of it is not known."""
        return self._sent_bytes if self._is_known else None
