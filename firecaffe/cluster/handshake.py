"""The handshake in which two ends of a new connection prove that they are of one run.

Neither end shows the key. The listener sends a challenge, and the caller answers with its own. Each
then sends an HMAC-SHA256 over both, the caller's rank and the sender's role (mutual authentication
by a keyed check function, ISO/IEC 9798-4, in three passes). Strangers delay nobody, and are closed.
"""

import hmac
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field

from firecaffe.errors import LaunchError

CHALLENGE_BYTES = 16
RANK = struct.Struct("!I")
MAC_BYTES = 32
CALL_BYTES = CHALLENGE_BYTES + RANK.size + MAC_BYTES

PROVE_S = 10.0
"""Seconds for a caller to prove itself; a rank needs milliseconds, unless it is stopped."""

MOST_UNPROVED = 256
"""Most callers at the same time that have not proved themselves yet."""

LEAST_S = 1.0
"""Seconds that a caller has in any case, if more callers come than that."""

LOOK_S = 0.1


def prove(peer: socket.socket, key: bytes, rank: int, deadline: float) -> None:
    """Call a listener, as this rank. Raises: OSError if no rank of this run listens there."""
    challenge = _read(peer, CHALLENGE_BYTES, deadline)
    said = secrets.token_bytes(CHALLENGE_BYTES) + RANK.pack(rank)
    peer.sendall(said + _mac(key, b"calls", challenge + said))
    answer = _read(peer, MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, _mac(key, b"listens", challenge + said)):
        raise OSError("no rank of this run listens there")


def accept(
    listener: socket.socket, key: bytes, missing: set[int], deadline: float
) -> dict[int, socket.socket]:
    """Accept the missing ranks' calls, to a deadline of time.monotonic(). Raises: LaunchError."""
    listener.setblocking(False)
    peers: dict[int, socket.socket] = {}
    callers = _Callers(listener, key)
    try:
        while left := missing - peers.keys():
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {min(left)} did not call in time, nor did {len(left) - 1} others"
                )
            for rank, peer in callers.look(deadline):
                if rank in missing - peers.keys():
                    peers[rank] = peer
                else:
                    peer.close()
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    finally:
        callers.close()
    return peers


@dataclass
class _Caller:
    peer: socket.socket
    since_s: float = field(default_factory=time.monotonic)
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(CHALLENGE_BYTES))
    said: bytes = b""


class _Callers:
    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._there: dict[int, _Caller] = {}  # by file descriptor, the oldest first

    def look(self, deadline: float) -> list[tuple[int, socket.socket]]:
        """Wait a moment; return (rank, socket) of each caller that has proved itself."""
        now = time.monotonic()
        while self._there and now - self._oldest.since_s > PROVE_S:
            self._drop_oldest()
        if len(self._there) >= MOST_UNPROVED and now - self._oldest.since_s > LEAST_S:
            self._drop_oldest()
        poll = select.poll()  # an epoll would take a descriptor
        for descriptor in self._there:
            poll.register(descriptor, select.POLLIN)
        if len(self._there) < MOST_UNPROVED:
            poll.register(self._listener, select.POLLIN)
        proved = []
        for descriptor, _ in poll.poll(1000 * max(0.0, min(LOOK_S, deadline - now))):
            if descriptor == self._listener.fileno():
                self._welcome()
            elif (said := self._hear(descriptor)) is not None:
                proved.append(said)
        return proved

    def close(self) -> None:
        while self._there:
            self._drop_oldest()

    @property
    def _oldest(self) -> _Caller:
        return next(iter(self._there.values()))

    def _drop_oldest(self) -> None:
        self._there.pop(next(iter(self._there))).peer.close()

    def _welcome(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # it is gone again, or this process has no descriptor left
            if self._there:
                self._drop_oldest()
            else:
                time.sleep(LOOK_S)
            return
        peer.setblocking(False)
        caller = _Caller(peer)
        try:
            peer.sendall(caller.challenge)  # the buffer of a new connection takes it
        except OSError:
            peer.close()
        else:
            self._there[peer.fileno()] = caller

    def _hear(self, descriptor: int) -> tuple[int, socket.socket] | None:
        caller = self._there[descriptor]
        try:
            part = caller.peer.recv(CALL_BYTES - len(caller.said))
            caller.said += part
            if part and len(caller.said) < CALL_BYTES:
                return None
            said, mac = caller.said[:-MAC_BYTES], caller.said[-MAC_BYTES:]
            content = caller.challenge + said
            if part and hmac.compare_digest(mac, _mac(self._key, b"calls", content)):
                caller.peer.sendall(_mac(self._key, b"listens", content))
                del self._there[descriptor]
                caller.peer.setblocking(True)
                return RANK.unpack(said[CHALLENGE_BYTES:])[0], caller.peer
        except BlockingIOError:
            return None
        except OSError:
            pass
        del self._there[descriptor]
        caller.peer.close()
        return None


def _mac(key: bytes, who: bytes, content: bytes) -> bytes:
    return hmac.digest(key, who + content, "sha256")


def _read(peer: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        peer.settimeout(max(0.01, deadline - time.monotonic()))
        part = peer.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
