"""Connects every two ranks of a world by a TCP socket of their own, beside the process group."""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from firecaffe.cluster.addresses import LOOPBACK, join_place, listen_to_all, own_addresses
from firecaffe.errors import LaunchError

TOKEN_BYTES = 16
RANK = struct.Struct("!I")
WELCOME = b"firecaffe"
TRY_S = 2.0
"""For one address of a rank that has several."""


@dataclass(frozen=True)
class Listener:
    """Where a rank may be called, and what it wants to hear."""

    host: str
    addresses: Sequence[str]
    port: int
    token: bytes


def connect_ranks(
    group: ProcessGroup, timeout_s: float, *, one_host: bool
) -> tuple[list[str], dict[int, socket.socket]]:
    """The hosts by rank, and a connected socket to every other rank. All ranks must call it.

    Addresses and a secret go by the group; who does not know the secret is not let in. Ranks of one
    host listen on its loopback alone. Where several hosts call themselves the same, their addresses
    tell them apart.

    Raises: LaunchError that names a rank which cannot be reached.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    deadline = time.monotonic() + timeout_s
    token = secrets.token_bytes(TOKEN_BYTES)
    with _listen(world_size, one_host) as listener:
        port = listener.getsockname()[1]
        addresses = [LOOPBACK] if one_host else own_addresses(os.environ.get("MASTER_ADDR", ""))
        own = Listener(socket.gethostname(), addresses, port, token)
        listeners = [own] * world_size
        dist.all_gather_object(listeners, own, group=group)
        sockets: dict[int, socket.socket] = {}
        try:
            for other in range(rank):
                sockets[other] = _call(listeners[other], rank, other, deadline)
            _answer(listener, token, sockets, range(rank + 1, world_size), deadline)
        except BaseException:
            for each in sockets.values():
                each.close()
            raise
    for each in sockets.values():
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return host_names(listeners), sockets


def host_names(listeners: Sequence[Listener]) -> list[str]:
    """By rank."""
    found = [(each.host, each.addresses[0]) for each in listeners]
    unique = len({address for _, address in found}) == len({name for name, _ in found})
    return [name if unique else f"{name}/{address}" for name, address in found]


def _listen(backlog: int, one_host: bool) -> socket.socket:
    if one_host:
        return socket.create_server((LOOPBACK, 0), backlog=backlog)
    return listen_to_all(backlog)


def _call(listener: Listener, rank: int, other: int, deadline: float) -> socket.socket:
    port, reasons = listener.port, []
    for address in _in_turn(listener.addresses):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            peer = socket.create_connection((address, port), min(TRY_S, left_s))
            peer.sendall(listener.token + RANK.pack(rank))
            # Else somebody else listens there. It may be busy with calls of its own.
            peer.settimeout(left_s)
            if _read(peer, len(WELCOME)) != WELCOME:
                raise OSError("no rank of this run listens there")
            return peer
        except OSError as error:
            reasons.append(f"{join_place(address, port)}: {error}")
    raise LaunchError(f"rank {rank} cannot reach rank {other}: {'; '.join(reasons)}")


def _in_turn(addresses: Sequence[str]) -> list[str]:
    """Each a second time: a listener's queue may have been full."""
    return [*addresses, *addresses]


def _answer(
    listener: socket.socket,
    token: bytes,
    sockets: dict[int, socket.socket],
    awaited: range,
    deadline: float,
) -> None:
    missing = set(awaited)
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
