"""The secret of a run, and a store of values that are signed with it; see SECURITY.md.

Processes that know the secret belong to the run. Ranks get it in their environment, which only
their user can read. The launcher of one host makes a secret; those of several are given the same.

torch's store answers all who reach its port. So each value follows its HMAC-SHA256 (RFC 2104) under
the secret, over key and value: none can be made up or moved to another key. A stranger can still
remove values, restore an earlier one, or change a count.
"""

import hmac
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from firecaffe.errors import LaunchError

SECRET = "FIRECAFFE_SECRET"
"""Environment variable with the secret itself."""

LEAST = 16

MOST_BYTES = 4096

HOW = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the secret in the environment, if any. Raises: LaunchError if it is too short."""
    text = environment.get(SECRET)
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
        # A pipe that nobody writes to would not be opened.
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
            text = file.read(MOST_BYTES).decode()
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


class StrangerError(LaunchError, RuntimeError):
    """A stored value is not signed with the secret. A RuntimeError, as torch's for bad stores."""


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
            raise StrangerError(
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


BACKLOG = 1024
"""Most calls that wait in the kernel."""


def hold_store(listener: socket.socket, host: str, timeout_s: float) -> TCPStore:
    """Return a store that takes over a listener, which this process finds at `host`."""
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,  # a script that asks for a store at this port gets this one
        master_listen_fd=listener.detach(),
    )
