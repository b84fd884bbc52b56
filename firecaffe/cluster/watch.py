"""Watches over the other ranks, and agrees with them on who is lost.

Every two ranks keep a socket beside the process group. A thread of each rank sends a beat with the
rank's step over all of them, and judges by what it hears. A process beside the rank beats as well,
for the thread cannot while one call holds the interpreter's lock (`cluster.pulse`).

- a socket closes, and the rank had not said goodbye: its process is *gone*. Seen at once.
- no beat of either for `silent_s` seconds while its host acknowledges ours: the process is
  *frozen*, for a signal has stopped it, or all that runs beside it.
- neither beats nor acknowledgements: it is *unreachable*. A rank for which most other hosts are
  says so of itself: its own link is cut.
- beats, but others waited for it until an exchange ran out of time: it is *stuck*, and known by
  its place, which is behind theirs.

Who comes to a verdict, or fails by itself, tells the others, and these take it: so all end with the
same words. (A process group's own errors come late, name no rank, or never come: a rank that waits
for the second half of a message from a killed one waits for the group's whole time-out.)
Sockets and not the launcher's store: they end with their process, and need no launcher.
"""

import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from firecaffe.cluster import pulse as beside
from firecaffe.cluster.last_word import end_process, leave_report
from firecaffe.errors import LaunchError, PeerLostError
from firecaffe.faults import MOST_TEXT, Fault

HEADER = struct.Struct("!BIBQI")
"""Kind, step, whether it waits for others, the sender's clock in ns, bytes of text that follow."""

BEAT, ECHO, GOODBYE, FAULT, PULSE = range(5)
"""An echo brings back the clock of the beat that it answers, for the time of the round trip. A
pulse is the beat of the process beside the rank, which knows no more than that the rank is there.
"""

TCP_INFO = struct.Struct("=56xI")
"""Of Linux's tcp_info: tcpi_last_ack_recv, in ms."""

BEATS = 4
"""In the time after which a silent rank is given up; one a second at least."""

SETTLE_S = 0.2
"""From the first lost rank to the verdict: several may have been lost at once."""

GRACE_S = 10.0
"""From the verdict until a rank that does not come out of a wait ends its process."""

LEAVE_S = 60.0
"""For what a rank has to do once it knows, such as to save what it is saving."""

MOST_BYTES = 40 * MOST_TEXT
"""Of a message's text."""

MOST_ROUND_TRIPS = 10_000
"""Kept until they are taken."""

LIBRARIES = ("LD_LIBRARY_PATH",)


@dataclass
class Place:
    """How far a rank has got."""

    step: int = 0
    """The step under way, counted from 1; the training keeps it."""
    waits: bool = False
    """Whether the rank has done its part and waits for others."""


@dataclass(frozen=True)
class RoundTrip:
    """A beat's way to a rank and back, in a step."""

    step: int
    peer: int
    in_host: bool
    """Whether both are on one host, where no link is between them."""
    round_trip_s: float


@dataclass
class _Peer:
    """What is known of another rank."""

    socket: socket.socket
    heard_s: float
    place: Place = field(default_factory=Place)
    received: bytearray = field(default_factory=bytearray)
    has_left: bool = False
    """Said goodbye, or told a fault; what its socket does then means nothing."""


class Watch:
    """This rank's eye on the others, from `Watch(...)` to `close`."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        sockets: Mapping[int, socket.socket],
        silent_s: float,
        place: Place,
    ) -> None:
        """hosts: by rank. sockets: to all other ranks; see `cluster.mesh`. place: this rank's."""
        self.rank, self.hosts, self.silent_s, self.place = rank, hosts, silent_s, place
        self.on_fault: Callable[[Fault], None] = lambda _: None
        """Called once, in a thread of its own, with the verdict on another rank."""
        now = time.monotonic()
        self._peers = {other: _Peer(each, now) for other, each in sockets.items()}
        self._gone_s: dict[int, float] = {}
        self._fault: Fault | None = None
        self._known = threading.Event()
        self._is_told = False
        self._round_trips: deque[RoundTrip] = deque(maxlen=MOST_ROUND_TRIPS)
        self._lock = threading.Lock()
        self._end_s = float("inf")
        self._beat_s = _beat_s(silent_s)
        self._selector = selectors.DefaultSelector()
        for other, peer in self._peers.items():
            peer.socket.setblocking(False)
            self._selector.register(peer.socket, selectors.EVENT_READ, other)
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._wake_end = wake
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> Fault | None:
        """The verdict on another rank, as soon as there is one."""
        return self._fault

    def take_round_trips(self) -> list[RoundTrip]:
        """Those since the last time."""
        taken = []
        while self._round_trips:
            taken.append(self._round_trips.popleft())
        return taken

    def check(self) -> None:
        """Raises: PeerLostError once there is a verdict."""
        if self._fault is not None:
            self._end_s = time.monotonic() + LEAVE_S
            raise PeerLostError.of(self._fault)

    def verdict(self, timed_out: bool) -> Fault | None:
        """Who is lost, asked after the process group has failed; None where nobody seems to be.

        timed_out: whether it failed because a time was over, with everybody there perhaps.
        """
        if not self._known.wait(2 * SETTLE_S):
            behind = self._behind() if timed_out else None
            if behind is not None:
                self._decide(behind)
            # Where one has said goodbye in the middle, nobody will have more to say.
            if not any(peer.has_left for peer in self._peers.values()):
                self._known.wait(2 * self._beat_s if timed_out else self.silent_s + self._beat_s)
        return self._fault

    def tell(self, fault: Fault) -> None:
        """Says to all what has happened to this rank, which leaves."""
        self._is_told = True
        self._send_all(FAULT, fault)

    def close(self) -> None:
        """Says goodbye, where nothing else was said, and ends the thread."""
        if not self._is_told:
            self._send_all(GOODBYE)
        self._closing = True
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        for peer in self._peers.values():
            peer.socket.close()
        self._wake.close()
        self._wake_end.close()
        self._selector.close()

    def _run(self) -> None:
        next_beat_s = looked_s = time.monotonic()
        while not self._closing:
            events = self._selector.select(max(0.0, next_beat_s - time.monotonic()))
            now = time.monotonic()
            for key, _ in events:
                if key.data is not None:
                    self._read(key.data, now)
            if now - looked_s > self.silent_s / 2:
                # This process has been asleep; who sleeps does not judge who was silent.
                for peer in self._peers.values():
                    peer.heard_s = now
            looked_s = now
            if now >= next_beat_s:
                self._send_all(BEAT)
                next_beat_s = now + self._beat_s
            if self._gone_s:
                next_beat_s = min(next_beat_s, now + SETTLE_S / 2)
            self._judge(now)
            if now > self._end_s:
                assert self._fault is not None
                leave_report(self._fault.line, self._fault)
                end_process(self._fault.exit_code)

    def _read(self, rank: int, now: float) -> None:
        peer = self._peers[rank]
        try:
            data = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(peer.socket)
            if not peer.has_left:
                peer.has_left = True
                self._gone_s[rank] = now
            return
        peer.heard_s = now
        peer.received += data
        while len(peer.received) >= HEADER.size:
            kind, step, waits, clock_ns, length = HEADER.unpack_from(peer.received)
            if length > MOST_BYTES or kind > PULSE:
                peer.received.clear()  # no rank of ours talks like this
                return
            if len(peer.received) < HEADER.size + length:
                return
            text = bytes(peer.received[HEADER.size : HEADER.size + length])
            del peer.received[: HEADER.size + length]
            if kind == PULSE:
                continue
            peer.place = Place(step, bool(waits))
            peer.has_left |= kind == GOODBYE
            if kind == BEAT:
                with self._lock, suppress(OSError):
                    peer.socket.send(self._header(ECHO, clock_ns))
            if kind == ECHO:
                taken_s = (time.monotonic_ns() - clock_ns) / 1e9
                in_host = self.hosts[rank] == self.hosts[self.rank]
                self._round_trips.append(RoundTrip(self.place.step, rank, in_host, taken_s))
            if kind == FAULT:
                with suppress(ValueError):
                    fault = Fault.parse(text.decode(errors="replace"))
                    peer.has_left = True
                    self._take(fault)

    def _judge(self, now: float) -> None:
        """Comes to a verdict, where it is due."""
        if self._fault is not None:
            return
        if self._gone_s and now - min(self._gone_s.values()) > SETTLE_S:
            lost = min(self._gone_s)
            self._decide(self._say("gone", lost, f"rank {self.rank}: its connection closed"))
            return
        silent_s = {r: now - p.heard_s for r, p in self._peers.items() if not p.has_left}
        # Where this rank's own link is cut, all others fall silent, within one beat.
        if max(silent_s.values(), default=0.0) > self.silent_s + 1.5 * self._beat_s:
            silent = [rank for rank, taken_s in silent_s.items() if taken_s > self.silent_s]
            self._decide(self._judge_silent(silent))

    def _judge_silent(self, silent: Sequence[int]) -> Fault:
        # What is sent every beat is acknowledged by a host that is there.
        too_long_s = self.silent_s / 2
        cut = [r for r in silent if _last_acknowledged_s(self._peers[r].socket) > too_long_s]
        elsewhere = {host for host in self.hosts if host != self.hosts[self.rank]}
        cut_hosts = {self.hosts[rank] for rank in cut}
        if len(elsewhere) > 1 and 2 * len(cut_hosts) > len(elsewhere):
            how = f"itself: {len(cut_hosts)} of {len(elsewhere)} other hosts do not answer"
            return self._say("unreachable", self.rank, how)
        taken_s = time.monotonic() - min(self._peers[rank].heard_s for rank in silent)
        how = f"rank {self.rank}: silent for {taken_s:.0f} s"
        if cut:
            return self._say("unreachable", min(cut), f"{how}, and its host does not answer")
        return self._say("frozen", min(silent), f"{how}, while its host answers")

    def _behind(self) -> Fault | None:
        """The rank for which others wait, where one has not got as far as this one."""
        now = time.monotonic()
        here = {rank: peer for rank, peer in self._peers.items() if not peer.has_left}
        if not here:
            return None
        silent = [rank for rank, peer in here.items() if now - peer.heard_s > 1.5 * self._beat_s]
        if silent:
            return self._judge_silent(silent)
        last = min(here, key=lambda rank: (here[rank].place.step, here[rank].place.waits, rank))
        peer = here[last]
        if (peer.place.step, peer.place.waits) >= (self.place.step, True):
            return None
        how = f"rank {self.rank}: others waited for it in vain"
        return Fault("stuck", last, self.hosts[last], peer.place.step, how)

    def _say(self, kind: str, rank: int, seen: str) -> Fault:
        # Beats are seconds old; but where steps are taken together, nobody is in an earlier one.
        step = max(self.place.step, self._peers[rank].place.step if rank != self.rank else 0)
        return Fault(kind, rank, self.hosts[rank], step, seen)

    def _decide(self, fault: Fault) -> None:
        """Comes to a verdict of its own, unless there is one, and tells it to the others."""
        if self._take(fault):
            self._is_told = True
            self._send_all(FAULT, fault)

    def _take(self, fault: Fault) -> bool:
        """The first verdict counts."""
        with self._lock:
            if self._fault is not None:
                return False
            self._fault = fault
        self._end_s = time.monotonic() + GRACE_S
        self._known.set()
        # It writes to a disk, which may be what has stalled.
        threading.Thread(target=self.on_fault, args=(fault,), daemon=True).start()
        return True

    def _send_all(self, kind: int, fault: Fault | None = None) -> None:
        text = b"" if fault is None else fault.as_text().encode()
        message = self._header(kind, time.monotonic_ns(), len(text)) + text
        with self._lock:
            for peer in self._peers.values():
                # A few bytes: either the kernel takes them all, or the rank has not read for long.
                with suppress(OSError):
                    peer.socket.send(message)

    def _header(self, kind: int, clock_ns: int, length: int = 0) -> bytes:
        return HEADER.pack(kind, self.place.step, self.place.waits, clock_ns, length)


@contextmanager
def pulse(sockets: Iterable[socket.socket], silent_s: float) -> Iterator[None]:
    """A process that beats beside this one's watch, over the same sockets.

    Raises: LaunchError where it cannot be started.
    """
    if not sys.platform.startswith("linux"):  # only there the kernel says who is stopped
        yield
        return
    numbers = [each.fileno() for each in sockets]
    message = HEADER.pack(PULSE, 0, False, 0, 0).hex()
    words = [os.getpid(), _beat_s(silent_s), message, *numbers]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", beside.__file__, *map(str, words)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It is no rank. And an interpreter may need to be told where its libraries are.
            env={name: os.environ[name] for name in LIBRARIES if name in os.environ},
            start_new_session=True,  # a terminal's signals are for the rank
        )
    except OSError as error:
        raise LaunchError(f"no process can be started beside the rank: {error}") from error
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _beat_s(silent_s: float) -> float:
    """Between two beats."""
    return min(1.0, silent_s / BEATS)


def _last_acknowledged_s(peer: socket.socket) -> float:
    """How long ago the peer's host has acknowledged anything of ours; 0 where no kernel tells.

    Not whether bytes are left to acknowledge: hosts take their time (40 ms and more) with a few.
    """
    if not sys.platform.startswith("linux"):
        return 0.0
    try:
        known = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
        return float(TCP_INFO.unpack(known)[-1]) / 1e3
    except (OSError, struct.error):  # closed
        return 0.0
