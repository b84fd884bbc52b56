"""The links over which ranks watch over each other: few for each rank, however many there are.

The first rank of each host watches for its host. These first ranks form a tree, and so do the ranks
of one host below their first. In each of the two trees a rank also has a link to its grandparent,
and those right below the root have one to the next of them; so a rank of the tree may be gone, or
silent, and news still go round it. (Between a host and the others stands its first rank alone.
If that one is lost, each side sees it for itself.)

Where rank 0 goes on without ranks that are lost, losses add up: of two lost ranks one above the
other, all below them would be cut off. There, each rank has a link to rank 0, and no other.

Connects a rank with those over which it watches, by TCP sockets beside the process group.

A rank that this one is linked with: the socket to it, and what has come over it.
"""

import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import Store

from firecaffe.cluster.addresses import (
    LOOPBACK,
    join_place,
    listen_at,
    listen_to_all,
    own_addresses,
)
from firecaffe.cluster.handshake import accept, prove
from firecaffe.cluster.message import MOST_BYTES, PULSE, Message, Place, Standing, take_messages
from firecaffe.cluster.pulse import end_turn, take_turn
from firecaffe.cluster.secret import own_secret, signed
from firecaffe.cluster.store import BACKLOG
from firecaffe.errors import LaunchError

FAN_OUT = 2
"""Children of a rank in a tree. Three would save two hops of nine at 512 hosts, for twice the
links."""


@dataclass(frozen=True)
class Links:
    """The ranks that a rank is linked with, each once."""

    parent: int | None = None
    children: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    """The grandparent and grandchildren, or the others right below the root."""

    @property
    def ranks(self) -> list[int]:
        """All linked ranks, in rank order."""
        above = () if self.parent is None else (self.parent,)
        return sorted((*above, *self.children, *self.beside))


def links_of(rank: int, hosts: Sequence[str], fan_out: int = FAN_OUT) -> Links:
    """The links of one rank. hosts: the name of each rank's host, by rank."""
    by_host: dict[str, list[int]] = {}
    for each, host in enumerate(hosts):
        by_host.setdefault(host, []).append(each)
    own = by_host[hosts[rank]]
    below = _in_tree(own.index(rank), own, fan_out)
    if rank != own[0]:
        return below
    firsts = [ranks[0] for ranks in by_host.values()]
    among = _in_tree(firsts.index(rank), firsts, fan_out)
    return Links(among.parent, among.children + below.children, among.beside + below.beside)


def star_of(rank: int, hosts: Sequence[str]) -> Links:
    """The links of one rank where all are linked with rank 0 alone. Rank 0 has one to each, as many
    as the server of a training has to its workers anyway.
    """
    return Links(parent=0) if rank else Links(children=tuple(range(1, len(hosts))))


Shape = Callable[[int, Sequence[str]], Links]
"""(rank, hosts by rank) -> the rank's links: `links_of` or `star_of`."""


def most_links(fan_out: int = FAN_OUT) -> int:
    """The most links that a rank has: a parent, two beside it, children and grandchildren; in two
    trees, if it is the root of one.
    """
    below = fan_out + fan_out**2
    return 3 + below + below


def _in_tree(place: int, ranks: Sequence[int], fan_out: int) -> Links:
    """The links in a complete tree by levels, as a heap: i's children start at i * fan_out + 1."""

    def children(of: int) -> range:
        return range(min(len(ranks), of * fan_out + 1), min(len(ranks), (of + 1) * fan_out + 1))

    beside = [grandchild for child in children(place) for grandchild in children(child)]
    parent = (place - 1) // fan_out if place else None
    if parent:
        beside.append((parent - 1) // fan_out)
    elif parent == 0:
        level = children(0)
        beside += [each for each in (place - 1, place + 1) if each in level]
    return Links(
        None if parent is None else ranks[parent],
        tuple(ranks[each] for each in children(place)),
        tuple(ranks[each] for each in beside),
    )


TOKEN_BYTES = 16
TRY_S = 2.0
"""Seconds to try one address of a rank that has several."""

LISTENERS = "firecaffe/listeners"
"""Keys in the store: LISTENERS/RANK has one rank's listener, LISTENERS all in rank order."""


@dataclass(frozen=True)
class Listener:
    """The addresses and port at which a rank listens, and what its callers prove that they know."""

    host: str
    addresses: Sequence[str]
    port: int
    token: str
    """Random, in hex digits."""

    @classmethod
    def of(cls, listening: socket.socket, one_host: bool) -> Self:
        addresses = [LOOPBACK] if one_host else own_addresses(os.environ.get("MASTER_ADDR", ""))
        token = secrets.token_hex(TOKEN_BYTES)
        return cls(socket.gethostname(), addresses, listening.getsockname()[1], token)

    @property
    def key(self) -> bytes:
        """What a caller must know: of the token and the run's secret. Where a run has none, who
        reads the store knows it.
        """
        return hmac.digest(own_secret() or b"", bytes.fromhex(self.token), "sha256")


def connect_ranks(
    store: Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    one_host: bool,
    shape: Shape = links_of,
) -> tuple[list[str], dict[int, socket.socket]]:
    """Connects this rank with the ranks that it is linked with. All ranks must call it. Returns the
    names of all ranks' hosts, by rank, and the connected sockets, by rank. store: of these ranks
    alone.

    Addresses go by the store. Who does not know the run's secret is not let in, or, where it has
    none, who has not read the store. Ranks of one host listen on its loopback alone. If several
    hosts call themselves the same, their addresses tell them apart.

    Raises: LaunchError that names a rank which cannot be reached; RuntimeError of the store's if
    one does not come.
    """
    deadline = time.monotonic() + timeout_s
    with listen(one_host) as listener:
        own = Listener.of(listener, one_host)
        listeners = _share(signed(store), own, rank, world_size, timedelta(seconds=timeout_s))
        hosts = host_names(listeners)
        linked = shape(rank, hosts).ranks
        sockets: dict[int, socket.socket] = {}
        try:
            for other in linked:
                if other < rank:
                    sockets[other] = call(listeners[other], rank, other, deadline)
            calling = {other for other in linked if other > rank}
            sockets |= accept(listener, own.key, calling, deadline)
        except BaseException:
            for each in sockets.values():
                each.close()
            raise
    for each in sockets.values():
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return hosts, sockets


def _share(
    store: Store, own: Listener, rank: int, world_size: int, timeout: timedelta
) -> list[Listener]:
    """The listeners of all ranks. Rank 0 puts them together, so that others read one key, not P.

    Not over the process group: it would not end if a rank is lost before there is a watch.
    """
    store.set(f"{LISTENERS}/{rank}", json.dumps(asdict(own)))
    if rank == 0:
        keys = [f"{LISTENERS}/{each}" for each in range(world_size)]
        store.wait(keys, timeout)
        store.set(LISTENERS, json.dumps([json.loads(store.get(key)) for key in keys]))
    store.wait([LISTENERS], timeout)
    return [Listener(**each) for each in json.loads(store.get(LISTENERS))]


def host_names(listeners: Sequence[Listener]) -> list[str]:
    """The names of the ranks' hosts, by rank."""
    found = [(each.host, each.addresses[0]) for each in listeners]
    unique = len({address for _, address in found}) == len({name for name, _ in found})
    return [name if unique else f"{name}/{address}" for name, address in found]


def listen(one_host: bool) -> socket.socket:
    """A socket at which other ranks call: of this host alone, or of all."""
    return listen_at(LOOPBACK, 0, BACKLOG) if one_host else listen_to_all(BACKLOG)


def call(listener: Listener, rank: int, other: int, deadline: float) -> socket.socket:
    """Calls another rank. Raises: LaunchError if it cannot be reached."""
    port, reasons = listener.port, []
    for address in _in_turn(listener.addresses):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            peer = socket.create_connection((address, port), min(TRY_S, left_s))
            try:
                prove(peer, listener.key, rank, deadline)  # it may be busy with calls of its own
            except BaseException:
                peer.close()
                raise
            return peer
        except OSError as error:
            reasons.append(f"{join_place(address, port)}: {error}")
    raise LaunchError(f"rank {rank} cannot reach rank {other}: {'; '.join(reasons)}")


def _in_turn(addresses: Sequence[str]) -> list[str]:
    """All addresses, and all a second time: a listener's queue may have been full."""
    return [*addresses, *addresses]


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
