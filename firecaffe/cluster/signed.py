"""A store whose values are believed only if somebody has written them who knows the run's secret.

A store of torch's answers whoever reaches its port. So each value stands behind its HMAC-SHA256
(RFC 2104) under the secret, over key and value: none can be made up, nor moved to another key. A
stranger can still take values away, put an earlier one back, or change a count.
"""

import hmac
from datetime import timedelta

from torch._C._distributed_c10d import Store

from firecaffe.cluster.secret import SECRET, own_secret
from firecaffe.errors import LaunchError

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
