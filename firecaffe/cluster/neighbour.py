"""A rank that this one is linked with: the socket to it, and what has come over it."""

import select
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field

from firecaffe.cluster.message import MOST_BYTES, PULSE, Message, Place, Standing, take_messages
from firecaffe.cluster.pulse import end_turn, take_turn

TCP_INFO = struct.Struct("=56xI")
"""The place of tcpi_last_ack_recv (ms) in Linux's tcp_info."""

MOST_UNSENT_BYTES = 2 * MOST_BYTES
TURN_S = 0.01
"""What is kept for a rank that does not read; what is more it is not told."""


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
    _unsent: bytearray = field(default_factory=bytearray)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: bytes) -> None:
        """Sends a message; what the kernel does not take goes with the next one."""
        with self._lock:
            if len(self._unsent) + len(message) <= MOST_UNSENT_BYTES:
                self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Sends what the kernel takes of what is left to send."""
        with self._lock:
            if not self._unsent or not take_turn(self.socket.fileno()):
                return
            try:
                del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # it is gone
                self._unsent.clear()
            if not self._unsent:
                end_turn(self.socket.fileno())

    def flush_until(self, end_s: float) -> None:
        """Waits until all is sent, if it has to, but not beyond a time by time.monotonic()."""
        poll = select.poll()
        if self._unsent:
            poll.register(self.socket, select.POLLOUT)
        while self._unsent and (left_s := end_s - time.monotonic()) > 0:
            left = len(self._unsent)
            poll.poll(left_s * 1000)
            self.flush()
            if len(self._unsent) == left:  # the process beside has the turn
                time.sleep(min(left_s, TURN_S))

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
