"""The links over which ranks watch each other: few per rank, even if there are many ranks.

The first ranks of hosts form a tree, and the ranks of one host form a tree below their first rank.
A rank also has a link to its grandparent, and the root's children have links to their next
siblings, so that messages get around a rank that is lost or silent. No link bypasses the first rank
of a host, but each side notices by itself that this rank is lost.

If rank 0 continues without lost ranks, two lost ranks in a row would cut off all ranks below them.
So each rank then has a single link, to rank 0.
"""

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from firecaffe.cluster.addresses import LOOPBACK, join_place, listen, own_addresses
from firecaffe.cluster.secret import accept, own_secret, prove, signed
from firecaffe.errors import LaunchError
from firecaffe.value_checks import some_of

FAN_OUT = 2
"""Children of a rank in a tree. Three would save 2 of 9 hops at 512 hosts, for twice the links."""


@dataclass(frozen=True)
class Links:
    parent: int | None = None
    children: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    """The grandparent (for a child of the root, the adjacent siblings) and the grandchildren."""

    @property
    def ranks(self) -> list[int]:
        above = () if self.parent is None else (self.parent,)
        return sorted((*above, *self.children, *self.beside))


def links_of(rank: int, hosts: Sequence[str], fan_out: int = FAN_OUT) -> Links:
    """Return the links of one rank. hosts: the name of each rank's host, by rank."""
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    on_host = by_host[hosts[rank]]
    below = _in_tree(on_host.index(rank), on_host, fan_out)
    if rank != on_host[0]:
        return below
    firsts = [ranks[0] for ranks in by_host.values()]
    among = _in_tree(firsts.index(rank), firsts, fan_out)
    return Links(among.parent, among.children + below.children, among.beside + below.beside)


def star_of(rank: int, hosts: Sequence[str]) -> Links:
    """Return the links of one rank if all are linked with rank 0 only."""
    # Rank 0 has one link per worker, as a training's server has anyway.
    return Links(parent=0) if rank else Links(children=tuple(range(1, len(hosts))))


Shape = Callable[[int, Sequence[str]], Links]
"""A function (rank, hosts by rank) -> the rank's links: `links_of` or `star_of`."""


def _in_tree(place: int, ranks: Sequence[int], fan_out: int) -> Links:
    """Return the links in a complete tree by levels: i's children start at i * fan_out + 1."""

    def children(of: int) -> range:
        return range(min(len(ranks), of * fan_out + 1), min(len(ranks), (of + 1) * fan_out + 1))

    relatives = [grandchild for child in children(place) for grandchild in children(child)]
    parent = (place - 1) // fan_out if place else None
    if parent:
        relatives.append((parent - 1) // fan_out)
    elif parent == 0:
        level = children(0)
        relatives += [sibling for sibling in (place - 1, place + 1) if sibling in level]
    return Links(
        None if parent is None else ranks[parent],
        tuple(ranks[child] for child in children(place)),
        tuple(ranks[other] for other in relatives),
    )


TOKEN_BYTES = 16
TRY_S = 2.0
"""Seconds to try one address of a rank that has several."""

LISTENERS = "firecaffe/listeners"
"""Keys in the store: LISTENERS/RANK has one rank's listener, LISTENERS all in rank order."""
WAIT_TURN_S = 5.0


@dataclass(frozen=True)
class Listener:
    """The addresses at which a rank listens, and a token for its callers."""

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
        """The key that callers must know, from the token and the run's secret."""
        # If a run has no secret, everybody who can read the store knows the key.
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
    """Connect this rank with its linked ranks. All ranks call it; the store is theirs only.

    Return the hosts' names, and the sockets, by rank. Raises: LaunchError about a rank that cannot
    be reached, or does not come; RuntimeError of the store's.
    """
    deadline = time.monotonic() + timeout_s
    with listen(one_host) as listener:
        described = Listener.of(listener, one_host)
        listeners = _share(signed(store), described, rank, world_size, deadline)
        hosts = host_names(listeners)
        linked = shape(rank, hosts).ranks
        sockets: dict[int, socket.socket] = {}
        try:
            for other in linked:
                if other < rank:
                    sockets[other] = call(listeners[other], rank, other, deadline)
            calling = {other for other in linked if other > rank}
            sockets |= accept(listener, described.key, calling, deadline)
        except BaseException:
            for peer in sockets.values():
                peer.close()
            raise
    for peer in sockets.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return hosts, sockets


def _share(
    store: Store, described: Listener, rank: int, world_size: int, deadline: float
) -> list[Listener]:
    # Do not use the process group: it would hang if a rank is lost before there is a watch. Rank 0
    # collects all listeners under one key, so that other ranks read one key, not P.
    store.set(f"{LISTENERS}/{rank}", json.dumps(asdict(described)))
    if rank == 0:
        keys = [f"{LISTENERS}/{number}" for number in range(world_size)]
        if silent := _wait(store, keys, deadline):
            ranks = some_of([key.rpartition("/")[2] for key in silent])
            raise LaunchError(f"{world_size} ranks did not meet: no word from rank {ranks}")
        store.set(LISTENERS, json.dumps([json.loads(store.get(key)) for key in keys]))
    elif _wait(store, [LISTENERS], deadline):
        raise LaunchError(f"{world_size} ranks did not meet: no word from rank 0")
    return [Listener(**row) for row in json.loads(store.get(LISTENERS))]


def _wait(store: Store, keys: list[str], deadline: float) -> list[str]:
    """Wait for keys until the deadline; return those that the store does not have.

    It waits in turns: if the store's answer gets lost, that costs one turn.
    """
    while True:
        left_s = max(deadline - time.monotonic(), 0.0)
        try:
            store.wait(keys, timedelta(seconds=min(WAIT_TURN_S, left_s) + 0.001))
        except DistStoreError:
            if left_s > 0:
                continue
            return [key for key in keys if not store.check([key])]
        return []


def host_names(listeners: Sequence[Listener]) -> list[str]:
    """Return the ranks' host names, by rank; with addresses if several hosts have one name."""
    pairs = [(listener.host, listener.addresses[0]) for listener in listeners]
    unique = len({address for _, address in pairs}) == len({name for name, _ in pairs})
    return [name if unique else f"{name}/{address}" for name, address in pairs]


def call(listener: Listener, rank: int, other: int, deadline: float) -> socket.socket:
    """Call another rank. Raises: LaunchError if it cannot be reached."""
    port, reasons = listener.port, []
    for address in (*listener.addresses, *listener.addresses):  # a queue may have been full
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            peer = socket.create_connection((address, port), min(TRY_S, left_s))
            try:
                prove(peer, listener.key, rank, deadline)  # it may be busy with its own calls
            except BaseException:
                peer.close()
                raise
            return peer
        except OSError as error:
            reasons.append(f"{join_place(address, port)}: {error}")
    raise LaunchError(f"rank {rank} cannot reach rank {other}: {'; '.join(reasons)}")
