"""Watches over the ranks that this one is linked with, and agrees with all on a lost rank.

A thread sends beats with this rank's step to its neighbors (`cluster.links`), and judges by what it
receives; a process beats as well, since a call may hold the interpreter's lock. A rank is *gone* if
its socket closes without a goodbye; *frozen* if it is silent while its host acknowledges beats;
*unreachable* if its host does not; *stuck* if it beats, but is behind others that waited for it
until an exchange timed out. The first verdict, or a rank's own fault, is passed on by all, so that
all ranks end with the same message. Beats also measure round trips.
"""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from firecaffe.cluster.calls import Calls
from firecaffe.cluster.handover import end_process, leave_report
from firecaffe.cluster.links import Shape, links_of, star_of
from firecaffe.cluster.neighbors import (
    BEAT,
    FAULT,
    GOODBYE,
    PARTING,
    SETTLE_S,
    LossJudge,
    Neighbor,
    RankProgress,
    WatchMessage,
    pack,
)
from firecaffe.errors import PeerLostError
from firecaffe.faults import Fault

MAX_KEPT = 10_000


@dataclass(frozen=True)
class RoundTrip:
    """The time from a beat to its echo from another rank, in a step."""

    step: int
    peer: int
    in_host: bool
    """Whether both ranks are on one host, so that no network link is between them."""
    round_trip_s: float


GRACE_S = 10.0
"""Seconds from the verdict until a rank that does not return from a wait ends its process."""

LEAVE_S = 60.0
"""Seconds for what a rank still does after the verdict, such as finishing a checkpoint."""

WRITE_S = 2.0
"""Seconds for which a leaving rank waits until the verdict is written to disk, and sent."""


Tell = Callable[[Fault, bool], object]
"""A function (another rank's fault, whether this rank continues without that rank)."""


class Watch:
    """A watch over the other ranks. This one is over none, and never comes to a verdict."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self.hosts = list(hosts) or [socket.gethostname()]
        self.place = RankProgress()

    @property
    def fault(self) -> Fault | None:
        """The verdict that ends this rank, as soon as there is one."""
        return None

    @property
    def losses(self) -> dict[int, Fault]:
        """The faults of the ranks that this one continues without."""
        return {}

    def on_verdict(self, tell: Tell) -> None:
        """Call `tell` in another thread, with the final verdict and with each tolerated loss."""

    def tolerate(self, call: Callable[[Fault], object]) -> None:
        """Let this rank, rank 0 of a star, continue without ranks that are lost from now on.

        `call` gets each fault, one after the other, in another thread. A rank that was given up but
        is still alive ends with that fault. Raises: ValueError.
        """

    def add_rank(self, host: str, to_it: socket.socket) -> None:
        """Watch over one more rank, after all others, by a socket to it."""

    def take_round_trips(self) -> list[RoundTrip]:
        """Return the newest round trips since the last call; another thread adds them."""
        return []

    def check(self) -> None:
        """Raise PeerLostError if there is a verdict, or if others did not come in time."""

    def verdict(self, timed_out: bool) -> Fault | None:
        """Return the verdict after a group's failure, if any; a time-out need not mean a loss."""
        return None

    def tell(self, fault: Fault) -> None:
        """Send this rank's own fault to all; it leaves, and ignores later faults of others."""


# Sockets close with their process, and unlike a store need no launcher. A process group's errors
# come late, name no rank, or never come.
class PeerWatch(Watch):
    """This rank's watch over its neighbors, from `PeerWatch(...)` to `close`."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        sockets: Mapping[int, socket.socket],
        silent_s: float,
        timeout_s: float = float("inf"),
        shape: Shape = links_of,
    ) -> None:
        """Watch over the ranks of `shape` by `sockets`; `timeout_s` limits waits for others."""
        super().__init__(hosts)
        self.rank, self.timeout_s = rank, timeout_s
        self._tell: Tell = lambda *_: None
        self._on_rank_lost: Callable[[Fault], object] | None = None
        self._losses: dict[int, Fault] = {}
        self._calls = Calls("verdicts")
        now = time.monotonic()
        self._neighbors = {other: Neighbor(peer, now) for other, peer in sockets.items()}
        self._judge = LossJudge(rank, self.hosts, silent_s, self.place, self._neighbors)
        self._comers: SimpleQueue[tuple[int, socket.socket, threading.Event]] = SimpleQueue()
        self._is_star = shape is star_of
        links = shape(rank, hosts)
        self._in_tree = {links.parent, *links.children} - {None}
        self._fault: Fault | None = None
        self._known = threading.Event()
        self._is_decided = False
        self._saw_goodbye = self._is_one_gone = False
        self._round_trips: deque[RoundTrip] = deque(maxlen=MAX_KEPT)
        self._lock = threading.Lock()
        self._end_s = float("inf")
        self._selector = selectors.DefaultSelector()
        for other, peer in sockets.items():
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ, other)
        self._wake, self._wake_end = socket.socketpair()
        self._selector.register(self._wake_end, selectors.EVENT_READ, None)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @property
    def losses(self) -> dict[int, Fault]:
        return dict(self._losses)

    def on_verdict(self, tell: Tell) -> None:
        self._tell = tell

    def tolerate(self, call: Callable[[Fault], object]) -> None:
        if self.rank != 0 or not self._is_star:
            raise ValueError(
                f"rank {self.rank} cannot go on without others; rank 0 can, if all are linked with "
                "it alone (star_of)"
            )
        # A verdict that exists already stands, and so does one on rank 0.
        with self._lock:
            self._on_rank_lost = call

    def add_rank(self, host: str, to_it: socket.socket) -> None:
        rank, is_there = len(self.hosts), threading.Event()
        self.hosts.append(host)
        to_it.setblocking(False)
        self._comers.put((rank, to_it, is_there))
        self._wake.send(b"x")
        is_there.wait(GRACE_S)

    def take_round_trips(self) -> list[RoundTrip]:
        return [self._round_trips.popleft() for _ in range(len(self._round_trips))]

    def check(self) -> None:
        if self._fault is not None:
            self._end_s = time.monotonic() + LEAVE_S
            raise PeerLostError.of(self._fault)
        # Wait some beats longer than the thread, which may still find out which rank is late.
        if self._waits_too_long(time.monotonic() - 2 * self._judge.beat_s):
            raise PeerLostError(f"another rank did not answer in time ({self.timeout_s:g} s)")

    def verdict(self, timed_out: bool) -> Fault | None:
        beat_s, silent_s = self._judge.beat_s, self._judge.silent_s
        if not self._known.wait(2 * SETTLE_S) and self._on_rank_lost is None:
            behind = self._judge.behind(time.monotonic()) if timed_out else None
            if behind is not None:
                self._decide(behind)
                self._known.wait()
            # If a rank has said goodbye in mid-training, no verdict will follow.
            elif not self._saw_goodbye:
                self._known.wait(2 * beat_s if timed_out else silent_s + beat_s)
        return self._fault

    def tell(self, fault: Fault) -> None:
        with self._lock:
            self._is_decided = True
        self._send_to_all(FAULT, fault.as_text().encode())

    def close(self) -> None:
        """Say goodbye, if no fault was sent, and end the thread."""
        if not self._is_decided:
            self._send_to_all(GOODBYE)
        self._closing = True
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()
        self._calls.close(patience_s=WRITE_S)
        end_s = time.monotonic() + WRITE_S
        for neighbor in self._neighbors.values():
            neighbor.flush_until(end_s)
            neighbor.socket.close()
        self._wake.close()
        self._wake_end.close()
        self._selector.close()

    def _run(self) -> None:
        next_look_s = looked_s = time.monotonic()
        while not self._closing:
            events = self._selector.select(max(0.0, next_look_s - time.monotonic()))
            now = time.monotonic()
            for key, _ in events:
                if key.data is not None:
                    self._read(key.data, now)
                else:
                    self._wake_end.recv(1)
                    self._admit(now)
            if now - looked_s > self._judge.silent_s / 2:
                # This process has been asleep, so it cannot judge which rank was silent.
                for neighbor in self._neighbors.values():
                    neighbor.last_seen_s = now
            looked_s = now
            if now >= next_look_s:
                self._beat()
                self._look(now)
                next_look_s = now + self._judge.beat_s
            if self._is_one_gone:
                next_look_s = min(next_look_s, now + SETTLE_S / 2)
            if now > self._end_s:
                assert self._fault is not None
                leave_report(self._fault.line, self._fault)
                end_process(self._fault.exit_code)

    def _look(self, now: float) -> None:
        self._is_one_gone = any(
            neighbor.gone_s is not None for neighbor in self._neighbors.values()
        )
        if self._fault is None:
            fault = self._judge.lost(now)
            if fault is None and self._waits_too_long(now):
                fault = self._judge.behind(now)
            if fault is not None:
                self._decide(fault)

    def _admit(self, now: float) -> None:
        # Runs in the watch's own thread, because that thread iterates over all neighbors.
        while not self._comers.empty():
            rank, to_it, is_there = self._comers.get()
            self._neighbors[rank] = Neighbor(to_it, now)
            self._in_tree.add(rank)
            self._selector.register(to_it, selectors.EVENT_READ, rank)
            is_there.set()

    def _waits_too_long(self, now: float) -> bool:
        if self._on_rank_lost is not None:
            return False  # a server waits for no worker
        # While Gloo connects two ranks, it has no time-out (its issue 520). Otherwise the group's
        # own time-out comes first, as it should: its error names the operation.
        too_long_s = self.timeout_s + 2 * self._judge.beat_s
        return self.place.waits and now - self.place.waits_from_s > too_long_s

    def _read(self, rank: int, now: float) -> None:
        of = self._neighbors[rank]
        messages = of.receive(now)
        if messages is None:
            self._selector.unregister(of.socket)
            if not of.has_left:
                of.has_left, of.gone_s = True, now
                self._is_one_gone = True
            return
        for message in messages:
            self._handle(rank, of, message)

    def _handle(self, rank: int, of: Neighbor, message: WatchMessage) -> None:
        of.place = RankProgress(message.step, message.waits)
        if message.kind == BEAT:
            of.furthest_behind = message.furthest_behind
            of.note_beat(message.clock_ns)
            if message.echo_ns:
                taken_s = (time.monotonic_ns() - message.echo_ns) / 1e9
                in_host = self.hosts[rank] == self.hosts[self.rank]
                self._round_trips.append(RoundTrip(self.place.step, rank, in_host, taken_s))
        elif message.kind == FAULT:
            with suppress(ValueError):
                fault = Fault.parse(message.text.decode(errors="replace"))
                # If losses are tolerated, only the rank itself reports its fault.
                of.has_left |= self._on_rank_lost is None or fault.rank == rank
                self._decide(fault)
        elif message.kind in (GOODBYE, PARTING):
            of.has_left |= message.kind == GOODBYE
            if not self._saw_goodbye and self._on_rank_lost is None:
                self._saw_goodbye = True
                self._send_to_all(PARTING)

    def _decide(self, fault: Fault) -> None:
        # The first verdict counts.
        with self._lock:
            if self._is_decided:
                return
            on_rank_lost = self._on_rank_lost if fault.rank != self.rank else None
            self._is_decided = on_rank_lost is None
        if on_rank_lost is not None:
            self._lose(fault, on_rank_lost)
            return
        # Pass the verdict on before this rank may act on it and leave.
        self._send_to_all(FAULT, fault.as_text().encode())
        self._fault = fault
        self._end_s = time.monotonic() + GRACE_S
        self._known.set()
        # In another thread, because `tell` writes to a disk, which may have stalled.
        self._calls.put(lambda: self._tell(fault, False))

    def _lose(self, fault: Fault, on_rank_lost: Callable[[Fault], object]) -> None:
        of = self._neighbors.get(fault.rank)
        if of is None or fault.rank in self._losses:
            return
        self._losses[fault.rank] = fault
        of.has_left, of.gone_s = True, None
        of.send(pack(FAULT, self.place, text=fault.as_text().encode()))
        self._calls.put(lambda: on_rank_lost(fault))
        self._calls.put(lambda: self._tell(fault, True))

    def _beat(self) -> None:
        for rank, neighbor in self._neighbors.items():
            if rank in self._losses:
                neighbor.flush()  # the fault must be the last message that it reads
                continue
            # After some beats, each rank thus knows the rank that is furthest behind of all.
            is_of_tree = rank in self._in_tree
            behind = self._judge.furthest_behind(without=rank) if is_of_tree else None
            # Each beat also answers the other's last beat, as in NTP, without a further message.
            neighbor.send(
                pack(BEAT, self.place, behind, time.monotonic_ns(), neighbor.take_echo_ns())
            )

    def _send_to_all(self, kind: int, text: bytes = b"") -> None:
        message = pack(kind, self.place, text=text)
        # A copy, because the watch's own thread may add a rank meanwhile.
        for neighbor in list(self._neighbors.values()):
            neighbor.send(message)
