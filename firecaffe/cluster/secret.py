"""The secret of a run, a store with signed values, and a handshake that proves the secret.

Processes that know the secret belong to the run; see SECURITY.md. Ranks get it in their
environment, which only their user can read. The launcher of one host makes a secret; those of
several are given the same.

torch's store answers everybody who reaches its port. So an HMAC-SHA256 (RFC 2104) under the secret,
over key and value, precedes each value: none can be forged or moved to another key. A stranger can
still remove values, restore an earlier one, or change a count.

In a handshake, neither end shows the key: each sends a challenge, and an HMAC-SHA256 over both, the
caller's rank and the sender's role (mutual authentication by a keyed check function, ISO/IEC
9798-4, in three passes). Strangers delay nobody, and their connections are closed.
"""

import hmac
import os
import secrets
import select
import socket
import stat
import struct
import time
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from firecaffe.errors import LaunchError
from firecaffe.value_checks import some_of

SECRET = "FIRECAFFE_SECRET"
"""Environment variable with the secret itself."""

LEAST = 16

MAX_BYTES = 4096

HOW = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def own_secret() -> bytes | None:
    """Return the secret in the environment, if any. Raises: LaunchError if it is too short."""
    text = os.environ.get(SECRET)
    return None if text is None else _checked(text, SECRET)


def secret_of(path: str, one_host: bool) -> bytes:
    """Return a file's or the environment's secret; one host may make one. Raises: LaunchError."""
    secret = read_secret(path) if path else own_secret()
    if secret is not None:
        return secret
    if not one_host:
        raise LaunchError(
            f"several hosts need a secret, the same on all: --secret-file FILE, or {SECRET}; {HOW}"
        )
    return secrets.token_hex(32).encode()


def read_secret(path: str) -> bytes:
    """Read a secret. Raises: LaunchError if others can read it, it is too short or unreadable."""
    word = f"--secret-file {path}"
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise LaunchError(f"{word} is not a regular file; {HOW}")
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise LaunchError(
                    f"{word} has mode {mode:04o}, so others may read it or write to it; "
                    f"it must be 0600 (chmod 600 {path})"
                )
            text = file.read(MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"{word} cannot be read: {reason}; {HOW}") from error
    return _checked(text, word)


def _checked(text: str, word: str) -> bytes:
    text = text.strip()
    if len(text) < LEAST:
        raise LaunchError(
            f"{word} holds {len(text)} characters; a secret has at least {LEAST}; {HOW}"
        )
    return os.fsencode(text)


MAC_BYTES = 32


class SignatureError(LaunchError, RuntimeError):
    """A stored value is not signed with the secret. A RuntimeError, as torch raises for stores."""


class SignedStore(Store):
    """A store with signed values, in another store; counts (`add`) are not signed."""

    def __init__(self, inner: Store, secret: bytes) -> None:
        super().__init__()
        self.inner, self._secret = inner, secret

    def set(self, key: str, value: str | bytes) -> None:
        self.inner.set(key, self._signed(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._read(key, self.inner.get(key))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """See base class; an empty `expected_value` means a key that does not exist."""
        expected = self._signed(key, expected_value) if expected_value else b""
        desired = self._signed(key, desired_value)
        return self._read(key, self.inner.compare_set(key, expected, desired))  # type: ignore[arg-type]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [
            self._read(key, value)
            for key, value in zip(keys, self.inner.multi_get(keys), strict=True)
        ]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.inner.wait(keys)
        else:
            self.inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout  # type: ignore[attr-defined, no-any-return]

    def _signed(self, key: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else value
        return self._mac(key, content) + content

    def _read(self, key: str, signed: bytes) -> bytes:
        mac, content = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise SignatureError(
                f"the run's store has a value of somebody with another secret, or none ({key}); "
                f"all of a run need the same (--secret-file, {SECRET})"
            )
        return content

    def _mac(self, key: str, content: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(8) + name + content, "sha256")


def signed(store: Store) -> Store:
    """Return the store, with values signed by this process's secret if it has one."""
    secret = own_secret()
    return store if secret is None else SignedStore(store, secret)


def hold_store(listener: socket.socket, host: str, timeout_s: float) -> TCPStore:
    """Return a store that takes over a listener, which this process reaches at `host`."""
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # a script that makes a store at this port gets this one
        master_listen_fd=listener.detach(),
    )


CHALLENGE_BYTES = 16
RANK = struct.Struct("!I")
CALL_BYTES = CHALLENGE_BYTES + RANK.size + MAC_BYTES

PROVE_S = 10.0
"""Seconds for a caller to prove itself; a rank needs milliseconds, unless it is stopped."""

MAX_UNPROVED = 256
"""Most callers at the same time that have not proved themselves yet."""

MIN_S = 1.0
"""Seconds that each caller has in any case, even if there are more than MAX_UNPROVED."""

POLL_S = 0.1


def prove(peer: socket.socket, key: bytes, rank: int, deadline: float) -> None:
    """Call a listener, as this rank. Raises: OSError if no rank of this run listens there."""
    challenge = _receive(peer, CHALLENGE_BYTES, deadline)
    said = secrets.token_bytes(CHALLENGE_BYTES) + RANK.pack(rank)
    peer.sendall(said + _mac(key, b"calls", challenge + said))
    answer = _receive(peer, MAC_BYTES, deadline)
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
                ranks = some_of([str(rank) for rank in sorted(left)])
                raise LaunchError(f"rank {ranks} did not call in time")
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
        if len(self._there) >= MAX_UNPROVED and now - self._oldest.since_s > MIN_S:
            self._drop_oldest()
        poll = select.poll()  # epoll would take a descriptor of its own
        for descriptor in self._there:
            poll.register(descriptor, select.POLLIN)
        if len(self._there) < MAX_UNPROVED:
            poll.register(self._listener, select.POLLIN)
        proved = []
        for descriptor, _ in poll.poll(1000 * max(0.0, min(POLL_S, deadline - now))):
            if descriptor == self._listener.fileno():
                self._welcome()
            elif (said := self._handle(descriptor)) is not None:
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
        except OSError:  # the caller is gone, or this process has no descriptor left
            if self._there:
                self._drop_oldest()
            else:
                time.sleep(POLL_S)
            return
        peer.setblocking(False)
        caller = _Caller(peer)
        try:
            peer.sendall(caller.challenge)  # the buffer of a new connection takes it
        except OSError:
            peer.close()
        else:
            self._there[peer.fileno()] = caller

    def _handle(self, descriptor: int) -> tuple[int, socket.socket] | None:
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


def _receive(peer: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        peer.settimeout(max(0.01, deadline - time.monotonic()))
        part = peer.recv(count - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data
