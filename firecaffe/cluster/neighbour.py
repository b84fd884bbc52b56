"""A rank that this one is linked with: the socket to it, and what has come over it."""

import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from firecaffe.cluster.message import PULSE, Message, Place, Standing, take_messages

TCP_INFO = struct.Struct("=56xI")
"""Of Linux's tcp_info: tcpi_last_ack_recv, in ms."""


@dataclass
class Neighbour:
    """Threads may send at once; one of them receives."""

    socket: socket.socket
    heard_s: float
    """When something last came from it, by time.monotonic()."""
    place: Place = field(default_factory=Place)
    furthest_behind: Standing | None = None
    """Of the ranks on its side of the tree; None if its link is none of the tree's."""
    has_left: bool = False
    """Said goodbye, or told a fault; what its socket does then means nothing."""
    gone_s: float | None = None
    """When its socket closed, without a word before."""
    _received: bytearray = field(default_factory=bytearray)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: bytes) -> None:
        # A few bytes: either the kernel takes them all, or the rank has not read for long.
        with self._lock, suppress(OSError):
            self.socket.send(message)

    def receive(self, now: float) -> list[Message] | None:
        """The whole messages that have come; None once the socket is closed. A pulse is none: it
        says only that the rank is there.
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
        """How long ago its host has acknowledged anything of ours; 0 if no kernel tells.

        Not whether bytes are left to acknowledge: hosts take their time (40 ms and more) with a
        few.
        """
        if not sys.platform.startswith("linux"):
            return 0.0
        try:
            known = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
            return float(TCP_INFO.unpack(known)[-1]) / 1e3
        except (OSError, struct.error):  # closed
            return 0.0
