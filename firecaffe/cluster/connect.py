"""Connects a rank with those over which it watches, by TCP sockets beside the process group."""

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from firecaffe.cluster.secret import own_secret
from firecaffe.cluster.signed import signed
from firecaffe.cluster.store import BACKLOG
from firecaffe.cluster.tree import Shape, links_of
from firecaffe.errors import LaunchError

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
