"""Connects a rank with those over which it watches, by TCP sockets beside the process group."""

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import Store

from firecaffe.cluster.addresses import LOOPBACK, join_place, listen_to_all, own_addresses
from firecaffe.cluster.tree import Shape, links_of, most_links, star_of
from firecaffe.errors import LaunchError

TOKEN_BYTES = 16
RANK = struct.Struct("!I")
WELCOME = b"firecaffe"
TRY_S = 2.0
"""Seconds to try one address of a rank that has several."""

LISTENERS = "firecaffe/listeners"
"""Keys in the store: LISTENERS/RANK has one rank's listener, LISTENERS all in rank order."""


@dataclass(frozen=True)
class Listener:
    """The addresses and port at which a rank listens, and the secret that a caller must know."""

    host: str
    addresses: Sequence[str]
    port: int
    token: str
    """The secret, in hex digits."""

    @classmethod
    def of(cls, listening: socket.socket, token: bytes, one_host: bool) -> Self:
        addresses = [LOOPBACK] if one_host else own_addresses(os.environ.get("MASTER_ADDR", ""))
        return cls(socket.gethostname(), addresses, listening.getsockname()[1], token.hex())


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

    Addresses and a secret go by the store; who does not know the secret is not let in. Ranks of one
    host listen on its loopback alone. If several hosts call themselves the same, their addresses
    tell them apart.

    Raises: LaunchError that names a rank which cannot be reached; RuntimeError of the store's if
    one does not come.
    """
    deadline = time.monotonic() + timeout_s
    token = secrets.token_bytes(TOKEN_BYTES)
    most = world_size if shape is star_of else most_links()
    with listen(min(world_size, most), one_host) as listener:
        own = Listener.of(listener, token, one_host)
        listeners = _share(store, own, rank, world_size, timedelta(seconds=timeout_s))
        hosts = host_names(listeners)
        linked = shape(rank, hosts).ranks
        sockets: dict[int, socket.socket] = {}
        try:
            for other in linked:
                if other < rank:
                    sockets[other] = call(listeners[other], rank, other, deadline)
            _answer(listener, token, sockets, {other for other in linked if other > rank}, deadline)
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


def listen(backlog: int, one_host: bool) -> socket.socket:
    """A socket at which other ranks call: of this host alone, or of all."""
    if one_host:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    return listen_to_all(backlog)


def call(listener: Listener, rank: int, other: int, deadline: float) -> socket.socket:
    """Calls another rank. Raises: LaunchError if it cannot be reached."""
    port, reasons = listener.port, []
    for address in _in_turn(listener.addresses):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            peer = socket.create_connection((address, port), min(TRY_S, left_s))
            peer.sendall(bytes.fromhex(listener.token) + RANK.pack(rank))
            # Else somebody else listens there. It may be busy with calls of its own.
            peer.settimeout(left_s)
            if _read(peer, len(WELCOME)) != WELCOME:
                raise OSError("no rank of this run listens there")
            return peer
        except OSError as error:
            reasons.append(f"{join_place(address, port)}: {error}")
    raise LaunchError(f"rank {rank} cannot reach rank {other}: {'; '.join(reasons)}")


def _in_turn(addresses: Sequence[str]) -> list[str]:
    """All addresses, and all a second time: a listener's queue may have been full."""
    return [*addresses, *addresses]


def accept(listener: socket.socket, token: bytes, rank: int, deadline: float) -> socket.socket:
    """Waits for the call of a rank. Raises: LaunchError if it does not come."""
    sockets: dict[int, socket.socket] = {}
    _answer(listener, token, sockets, {rank}, deadline)
    return sockets[rank]


def _answer(
    listener: socket.socket,
    token: bytes,
    sockets: dict[int, socket.socket],
    missing: set[int],
    deadline: float,
) -> None:
    while missing:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            raise LaunchError(
                f"rank {min(missing)} did not call in time, nor did {len(missing) - 1} others"
            ) from None
        try:
            peer.settimeout(TRY_S)
            said = _read(peer, TOKEN_BYTES + RANK.size)
            other = RANK.unpack(said[TOKEN_BYTES:])[0]
            known = hmac.compare_digest(said[:TOKEN_BYTES], token) and other in missing
            if known:
                peer.sendall(WELCOME)
        except (OSError, struct.error):
            known = False
        if not known:
            peer.close()
            continue
        sockets[other] = peer
        missing.remove(other)


def _read(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
