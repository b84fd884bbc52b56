"""A rank that this one is linked with: the socket to it, and what has come over it."""

import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from firecaffe.cluster.message import PULSE, Message, Place, Standing, take_messages

TCP_INFO = struct.Struct("=56xI")
"""The place of tcpi_last_ack_recv (ms) in Linux's tcp_info."""


@dataclass
class Neighbour:
    """A linked rank and its socket. Several threads may send at once; one receives."""

    socket: socket.socket
    heard_s: float
    """The time at which something last came from it, by time.monotonic()."""
    place: Place = field(default_factory=Place)
    furthest_behind: Standing | None = None
    """The rank furthest behind on its side of the tree; None if its link is not in the tree."""
    has_left: bool = False
    """Whether it said goodbye or told a fault; what its socket does then means nothing."""
    gone_s: float | None = None
    """The time at which its socket closed without a word before."""
    _received: bytearray = field(default_factory=bytearray)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: bytes) -> None:
        # A few bytes: either the kernel takes them all, or the rank has not read for long.
        with self._lock, suppress(OSError):
            self.socket.send(message)

    def receive(self, now: float) -> list[Message] | None:
        """Receives the whole messages that have come; None once the socket is closed. A pulse is
        not returned: it says only that the rank is there.
        """
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.heard_s = now
        self._received += data
        return [each for each in take_messages(self._received) if each.kind != PULSE]

    def last_acknowledged_s(self) -> float:
        """Seconds since its host last acknowledged bytes of ours; 0 if the kernel does not tell.

        Bytes that are left to acknowledge would not do: a host may take 40 ms and more for a few.
        """
        if not sys.platform.startswith("linux"):
            return 0.0
        try:
            known = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
            return float(TCP_INFO.unpack(known)[-1]) / 1e3
        except (OSError, struct.error):  # closed
            return 0.0
