"""The secret of a run: who knows it belongs to the run; see SECURITY.md.

Ranks have it from their launcher, in their environment, which their user alone can read. A launcher
of one host makes one by itself; those of several hosts are given the same.

A store whose values are believed only if somebody has written them who knows the run's secret.

A store of torch's answers whoever reaches its port. So each value stands behind its HMAC-SHA256
(RFC 2104) under the secret, over key and value: none can be made up, nor moved to another key. A
stranger can still take values away, put an earlier one back, or change a count.
"""

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from firecaffe.errors import LaunchError

SECRET = "FIRECAFFE_SECRET"
"""An environment variable: the secret itself."""

LEAST = 16
"""Characters of a secret, at least."""

MOST_BYTES = 4096

HOW = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


def own_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret in this process's environment; None without one.

    Raises: LaunchError if it is too short to be one.
    """
    text = environment.get(SECRET)
    return None if text is None else _checked(text, SECRET)


def secret_of(path: str, one_host: bool) -> bytes:
    """The secret of a launch. path: `--secret-file`, or empty: then it is that of the environment,
    or on one host one that nobody else knows.

    Raises: LaunchError if several hosts have none, or it is none.
    """
    found = read_secret(path) if path else own_secret()
    if found is not None:
        return found
    if not one_host:
        raise LaunchError(
            f"several hosts need a secret, the same on all: --secret-file FILE, or {SECRET}; {HOW}"
        )
    return secrets.token_hex(32).encode()


def read_secret(path: str) -> bytes:
    """Reads a file with a secret.

    Raises: LaunchError if it cannot be read, others can read it, or it holds none.
    """
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
    """A value in the store is of nobody who knows the secret. A RuntimeError, as those that torch
    raises of a store that cannot be used.
    """


class SignedStore(Store):
    """Another store, with signed values; counts (`add`) are as they are there."""

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
        """See base class; an empty `expected_value` is a key that is not there."""
        expected = self._signed(key, expected_value) if expected_value else b""
        desired = self._signed(key, desired_value)
        return self._read(key, self.inner.compare_set(key, expected, desired))  # type: ignore[arg-type]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [
            self._read(key, each)
            for key, each in zip(keys, self.inner.multi_get(keys), strict=True)
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
    """A store with the values signed under this process's secret; as it is, if there is none."""
    secret = own_secret()
    return store if secret is None else SignedStore(store, secret)
