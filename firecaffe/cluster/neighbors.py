"""A rank's neighbors in the watch: their messages, what is known of each, the verdict on lost ones.

A message is a header of fixed length, and a text.
"""

import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from firecaffe.cluster.pulse import try_lock, unlock
from firecaffe.faults import MAX_TEXT, Fault

HEADER = struct.Struct("!BI?I?IQQI")
"""Fields: kind; step, waits; step, waits, rank of the rank furthest behind; clock, echo; bytes."""

BEAT, GOODBYE, FAULT, PULSE, PARTING = range(5)
"""The kinds.

A pulse is the beat of the process next to the rank, and shows only that the rank is there. A
parting says that another rank has said goodbye. Faults and partings are passed on.
"""

MAX_BYTES = 40 * MAX_TEXT

NOBODY = (1 << 32) - 1


@dataclass
class RankProgress:
    step: int = 0
    """The step under way, counted from 1; the training updates it."""
    waits: bool = False
    """Whether the rank has done its part and waits for others."""
    waits_from_s: float = float("inf")
    """The time at which the wait began, by time.monotonic()."""


class Standing(NamedTuple):
    """A rank's progress, ordered so that the least is furthest behind."""

    step: int
    waits: bool
    rank: int


class WatchMessage(NamedTuple):
    kind: int
    step: int
    waits: bool
    furthest_behind: Standing | None
    """The rank furthest behind that the sender's side of the tree knows of."""
    clock_ns: int
    """The sender's clock; 0 if it wants no echo."""
    echo_ns: int
    """The receiver's clock of its last beat, plus the time that the sender held it; 0 if none."""
    text: bytes


def pack(
    kind: int,
    place: RankProgress,
    furthest_behind: Standing | None = None,
    clock_ns: int = 0,
    echo_ns: int = 0,
    text: bytes = b"",
) -> bytes:
    behind = furthest_behind or Standing(0, False, NOBODY)
    return HEADER.pack(kind, place.step, place.waits, *behind, clock_ns, echo_ns, len(text)) + text


def take_messages(received: bytearray) -> list[WatchMessage]:
    """Remove and return the complete messages at the front of the bytes; drop malformed bytes."""
    taken = []
    while len(received) >= HEADER.size:
        kind, step, waits, *behind, clock_ns, echo_ns, length = HEADER.unpack_from(received)
        if length > MAX_BYTES or kind > PARTING:
            received.clear()  # no rank of ours sends this
            break
        if len(received) < HEADER.size + length:
            break
        text = bytes(received[HEADER.size : HEADER.size + length])
        del received[: HEADER.size + length]
        standing = Standing(*behind)
        known = None if standing.rank == NOBODY else standing
        taken.append(WatchMessage(kind, step, waits, known, clock_ns, echo_ns, text))
    return taken


TCP_INFO = struct.Struct("=56xI")
"""The offset of tcpi_last_ack_recv (ms) in Linux's tcp_info."""

MAX_UNSENT_BYTES = 2 * MAX_BYTES
"""Most unsent bytes for a rank that does not read; further messages are dropped."""
TURN_S = 0.01


@dataclass
class Neighbor:
    """A linked rank and its socket. Several threads may send at once; one receives."""

    socket: socket.socket
    last_seen_s: float
    """The time of the last bytes from this rank, by time.monotonic()."""
    place: RankProgress = field(default_factory=RankProgress)
    furthest_behind: Standing | None = None
    """The rank furthest behind on its side of the tree; None if its link is not in the tree."""
    has_left: bool = False
    """Whether it said goodbye or sent a fault; then its closed socket means nothing."""
    gone_s: float | None = None
    """The time at which its socket closed without a goodbye or fault."""
    _beat_ns: tuple[int, int] | None = None
    """Its clock as of its last beat, and ours then; None if that beat was answered."""
    _received: bytearray = field(default_factory=bytearray)
    _unsent: bytearray = field(default_factory=bytearray)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_beat(self, clock_ns: int) -> None:
        self._beat_ns = clock_ns, time.monotonic_ns()

    def take_echo_ns(self) -> int:
        """Return the clock of its last beat plus the time since then; 0 if that was answered."""
        beat_ns, self._beat_ns = self._beat_ns, None
        return 0 if beat_ns is None else beat_ns[0] + time.monotonic_ns() - beat_ns[1]

    def send(self, message: bytes) -> None:
        """Send a message; what the kernel does not accept is sent with the next one."""
        with self._lock:
            if len(self._unsent) + len(message) <= MAX_UNSENT_BYTES:
                self._unsent += message
        self.flush()

    def flush(self) -> None:
        with self._lock:
            if not self._unsent or not try_lock(self.socket.fileno()):
                return
            try:
                del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:  # it is gone
                self._unsent.clear()
            if not self._unsent:
                unlock(self.socket.fileno())

    def flush_until(self, end_s: float) -> None:
        """Wait until all is sent, but not beyond `end_s`, by time.monotonic()."""
        poll = select.poll()
        if self._unsent:
            poll.register(self.socket, select.POLLOUT)
        while self._unsent and (left_s := end_s - time.monotonic()) > 0:
            left = len(self._unsent)
            poll.poll(left_s * 1000)
            self.flush()
            if len(self._unsent) == left:  # the pulse process holds the lock on the socket
                time.sleep(min(left_s, TURN_S))

    def receive(self, now: float) -> list[WatchMessage] | None:
        """Return the complete messages received, without pulses; None if the socket is closed."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        self.last_seen_s = now
        self._received += data
        return [message for message in take_messages(self._received) if message.kind != PULSE]

    def last_acknowledged_s(self) -> float:
        """Return seconds since its host last acknowledged our bytes; 0 if that is not known."""
        if not sys.platform.startswith("linux"):
            return 0.0
        try:
            # Unacknowledged bytes tell less: a host may take over 40 ms to acknowledge a few.
            known = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
            return float(TCP_INFO.unpack(known)[-1]) / 1e3
        except (OSError, struct.error):  # closed
            return 0.0


BEATS = 4
"""Beats in `silent_s`, after which a silent rank is given up; at least one beat a second."""

SETTLE_S = 0.2
"""Seconds from the first lost rank to the verdict, as several may be lost at the same time."""


@dataclass(frozen=True)
class LossJudge:
    rank: int
    hosts: Sequence[str]
    silent_s: float
    place: RankProgress
    neighbors: Mapping[int, Neighbor]

    @property
    def beat_s(self) -> float:
        return beat_s(self.silent_s)

    def lost(self, now: float) -> Fault | None:
        """Return the verdict on a rank that is gone or silent, if one is due."""
        gone_s = {r: n.gone_s for r, n in self.neighbors.items() if n.gone_s is not None}
        if gone_s and now - min(gone_s.values()) > SETTLE_S:
            return self.say("gone", min(gone_s), f"rank {self.rank}: its connection closed")
        silent_s = {r: now - n.last_seen_s for r, n in self.neighbors.items() if not n.has_left}
        # If this rank's own link is cut, all others fall silent within one beat, so wait for that.
        if max(silent_s.values(), default=0.0) > self.silent_s + 1.5 * self.beat_s:
            return self._silent([r for r, taken_s in silent_s.items() if taken_s > self.silent_s])
        return None

    def behind(self, now: float) -> Fault | None:
        """Return the fault of a silent rank, else of a rank that is behind this one, if any."""
        here = {
            rank: neighbor for rank, neighbor in self.neighbors.items() if not neighbor.has_left
        }
        silent = [
            rank
            for rank, neighbor in here.items()
            if now - neighbor.last_seen_s > 1.5 * self.beat_s
        ]
        if silent:
            return self._silent(silent)
        last = self.furthest_behind(without=self.rank)
        if last is None or (last.step, last.waits) >= (self.place.step, True):
            return None
        how = f"rank {self.rank}: others waited for it in vain"
        return Fault("stuck", last.rank, self.hosts[last.rank], last.step, how)

    def furthest_behind(self, without: int) -> Standing | None:
        """Return the rank furthest behind, except on the side of neighbor `without`."""
        known = [
            neighbor.furthest_behind
            for rank, neighbor in self.neighbors.items()
            if rank != without and neighbor.furthest_behind is not None and not neighbor.has_left
        ]
        if without != self.rank:  # otherwise this rank leaves itself out
            known.append(Standing(self.place.step, self.place.waits, self.rank))
        return min(known, default=None)

    def say(self, kind: str, rank: int, seen: str) -> Fault:
        """Return the fault of a linked rank, or of this rank."""
        # Beats are seconds old. But if ranks step together, none is in an earlier step.
        other = self.place if rank == self.rank else self.neighbors[rank].place
        return Fault(kind, rank, self.hosts[rank], max(self.place.step, other.step), seen)

    def _silent(self, silent: Sequence[int]) -> Fault:
        # A host that is alive and connected acknowledges every beat.
        too_long_s, linked = self.silent_s / 2, self.neighbors
        cut = [r for r in silent if linked[r].last_acknowledged_s() > too_long_s]
        elsewhere = {self.hosts[rank] for rank in linked} - {self.hosts[self.rank]}
        cut_hosts = {self.hosts[rank] for rank in cut}
        # If most other hosts are silent, this rank's own link is cut.
        if len(elsewhere) > 1 and 2 * len(cut_hosts) > len(elsewhere):
            how = f"itself: {len(cut_hosts)} of {len(elsewhere)} other hosts do not answer"
            return self.say("unreachable", self.rank, how)
        taken_s = time.monotonic() - min(linked[rank].last_seen_s for rank in silent)
        how = f"rank {self.rank}: silent for {taken_s:.0f} s"
        if cut:
            return self.say("unreachable", min(cut), f"{how}, and its host does not answer")
        return self.say("frozen", min(silent), f"{how}, while its host answers")


def beat_s(silent_s: float) -> float:
    """Return seconds between two beats; a rank silent for `silent_s` is given up."""
    return min(1.0, silent_s / BEATS)
