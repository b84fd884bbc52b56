"""A run's secret, what of a store is believed for it, and who is let in by a listener."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from firecaffe.cluster import secret
from firecaffe.cluster.addresses import LOOPBACK, listen
from firecaffe.cluster.secret import (
    CALL_BYTES,
    CHALLENGE_BYTES,
    SECRET,
    SignatureError,
    SignedStore,
    accept,
    prove,
    read_secret,
    secret_of,
    signed,
)
from firecaffe.errors import LaunchError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_file_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "of the environment")
    path = written(tmp_path, "of a file, so to say\n")
    assert secret_of(path, one_host=False) == b"of a file, so to say"
    assert secret_of("", one_host=False) == b"of the environment"


def test_one_host_has_one_that_nobody_knows_and_several_need_the_same() -> None:
    assert len(secret_of("", one_host=True)) >= 32
    assert secret_of("", one_host=True) != secret_of("", one_host=True)
    with pytest.raises(LaunchError, match=rf"--secret-file FILE, or {SECRET}; make one with"):
        secret_of("", one_host=False)


def test_what_is_too_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("", "\n", "short"):
        with pytest.raises(LaunchError, match=f"holds {len(text.strip())} characters"):
            read_secret(written(tmp_path, text))
        monkeypatch.setenv(SECRET, text)
        with pytest.raises(LaunchError, match=f"{SECRET} holds"):
            secret_of("", one_host=True)


def test_what_is_no_file_of_text_or_others_reach_is_refused(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o660, 0o602):
        with pytest.raises(LaunchError, match=rf"mode {mode:04o}.*must be 0600"):
            read_secret(written(tmp_path, "x" * 40, mode))
    with pytest.raises(LaunchError, match="no-file cannot be read: No such file"):
        read_secret(str(tmp_path / "no-file"))
    with pytest.raises(LaunchError, match=r"Is a directory|not a regular file"):
        read_secret(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(LaunchError, match="not a regular file"):
        read_secret(str(tmp_path / "pipe"))
    path = written(tmp_path, "")
    Path(path).write_bytes(b"\xff" * 40)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_secret(path)


OURS, THEIRS = b"of this run alone", b"of some other run"


@pytest.fixture
def inner() -> Store:
    return HashStore()


def test_who_knows_the_secret_is_believed(inner: Store) -> None:
    store, other = SignedStore(inner, OURS), SignedStore(inner, OURS)
    below = PrefixStore("below", store)  # asks it in C++
    store.set("text", "words")
    below.set("bytes", b"\xff\x00")  # type: ignore[arg-type]
    assert other.get("text") == b"words"
    assert PrefixStore("below", other).get("bytes") == other.get("below/bytes") == b"\xff\x00"
    store.multi_set(["a", "b"], ["1", "2"])
    assert other.multi_get(["a", "b"]) == [b"1", b"2"]
    assert store.compare_set("new", "", "first") == b"first"
    assert other.compare_set("new", "no", "second") == b"first"
    assert other.compare_set("new", "first", "second") == b"second"
    assert (store.add("count", 2), other.add("count", 3)) == (2, 5)


@pytest.mark.parametrize("value", [b"plain", b"x" * 100, THEIRS])
def test_who_knows_no_secret_or_another_is_not(inner: Store, value: bytes) -> None:
    if value == THEIRS:
        SignedStore(inner, THEIRS).set("below/key", "value")
    else:
        inner.set("below/key", value)  # type: ignore[arg-type]
    store = SignedStore(inner, OURS)
    below = PrefixStore("below", store)
    for ask in (
        lambda: store.get("below/key"),
        lambda: store.multi_get(["below/key"]),
        lambda: store.compare_set("below/key", "", "mine"),
        lambda: below.get("key"),
        lambda: below.multi_get(["key"]),
    ):
        with pytest.raises(SignatureError, match="--secret-file") as told:
            ask()
        assert told.value.exit_code == LaunchError.exit_code


def test_a_value_counts_at_its_own_key_alone(inner: Store) -> None:
    store = SignedStore(inner, OURS)
    store.set("here", "value")
    inner.set("there", inner.get("here"))  # type: ignore[arg-type]
    with pytest.raises(SignatureError):
        store.get("there")


def test_torchs_rendezvous_takes_it_for_a_store_that_failed(inner: Store) -> None:
    backend = C10dRendezvousBackend(SignedStore(inner, OURS), "run")
    assert backend.get_state() is None
    state, token, is_set = backend.set_state(b"state") or (b"", None, False)
    assert (state, is_set) == (b"state", True)
    assert backend.set_state(b"next", token) is not None
    inner.set("torch.rendezvous.run", "c3RhdGU=")
    with pytest.raises(RendezvousConnectionError) as told:
        backend.get_state()
    assert isinstance(told.value.__cause__, SignatureError)


def test_without_a_secret_a_store_is_as_it_is(
    inner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert signed(inner) is inner
    monkeypatch.setenv(SECRET, OURS.decode())
    signed(inner).set("key", "value")
    assert SignedStore(inner, OURS).get("key") == b"value"


KEY = b"k" * 32
LONG_S = 300.0


def soon() -> float:
    return time.monotonic() + LONG_S


class Met:
    """A listener, who waits at it, and who calls."""

    def __init__(self, listener: socket.socket, threads: ThreadPoolExecutor) -> None:
        self.listener, self.threads = listener, threads

    def waits(self, *ranks: int) -> "Future[dict[int, socket.socket]]":
        return self.threads.submit(accept, self.listener, KEY, {*ranks}, soon())

    def call(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname())

    def as_rank(self, rank: int, key: bytes = KEY) -> socket.socket:
        peer = self.call()
        try:
            prove(peer, key, rank, soon())
        except OSError:
            peer.close()
            raise
        return peer


@pytest.fixture
def met() -> Iterator[Met]:
    with listen(one_host=True) as listener, ThreadPoolExecutor() as threads:
        yield Met(listener, threads)


def test_ranks_that_know_the_key_are_connected(met: Met) -> None:
    found = met.waits(1, 2)
    with met.as_rank(2) as second, met.as_rank(1) as first:
        first.sendall(b"1")
        second.sendall(b"2")
        to = found.result()
        assert {rank: to[rank].recv(9) for rank in to} == {1: b"1", 2: b"2"}
        for each in to.values():
            each.close()


def test_who_is_silent_holds_up_nobody(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than may wait."""
    monkeypatch.setattr(secret, "MAX_UNPROVED", 4)
    monkeypatch.setattr(secret, "MIN_S", 0.0)
    with ExitStack() as strangers:
        silent = [strangers.enter_context(met.call()) for _ in range(20)]
        found = met.waits(1)
        with met.as_rank(1), found.result()[1]:
            pass
        for each in silent:  # all are closed
            each.settimeout(LONG_S)
            while each.recv(64):
                pass


def test_who_takes_too_long_is_closed(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret, "PROVE_S", 0.05)
    with met.call() as silent:
        found = met.waits(1)
        silent.settimeout(LONG_S)
        assert len(silent.recv(64)) == CHALLENGE_BYTES
        assert silent.recv(64) == b""
        assert not found.done()
        monkeypatch.setattr(secret, "PROVE_S", LONG_S)
        with met.as_rank(1), found.result()[1]:
            pass


@pytest.mark.parametrize(
    "said", [b"", b"x", b"\0" * CALL_BYTES, b"GET / HTTP/1.1\r\n\r\n" * 20], ids=len
)
def test_who_says_something_else_is_closed(met: Met, said: bytes) -> None:
    found = met.waits(1)
    with met.call() as stranger:
        stranger.sendall(said)
        with suppress(OSError):  # it may be closed by now
            stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=r"no rank of this run|closed|reset"):
            met.as_rank(1, key=b"another")
        with met.as_rank(1), found.result()[1]:
            pass


def test_a_rank_that_nobody_waits_for_is_not_taken(met: Met) -> None:
    found = met.waits(1)
    with met.as_rank(7), met.as_rank(1):
        assert found.result().keys() == {1}
        found.result()[1].close()


def test_a_recorded_call_proves_nothing(met: Met) -> None:
    found = met.waits(1, 2)
    with met.as_rank(1), met.call() as again:
        own = b"\1" * CHALLENGE_BYTES
        challenge = again.recv(CHALLENGE_BYTES)
        content = own + secret.RANK.pack(2)
        again.sendall(content + secret._mac(KEY, b"calls", challenge[::-1] + content))
        again.settimeout(LONG_S)
        assert again.recv(64) == b""
        with met.as_rank(2):
            for each in found.result().values():
                each.close()


def test_who_listens_without_the_key_is_not_believed(met: Met) -> None:
    calling = met.threads.submit(met.as_rank, 1)
    peer, _ = met.listener.accept()
    with peer:
        peer.sendall(b"c" * CHALLENGE_BYTES)
        peer.recv(CALL_BYTES)
        peer.sendall(b"m" * 32)
        with pytest.raises(OSError, match=r"no rank of this run listens there"):
            calling.result()


class Full(socket.socket):
    """A listener of a process that has no descriptor left, three times."""

    tries = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.tries += 1
        if self.tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_no_descriptor_left_is_waited_out(met: Met) -> None:
    with Full() as full:
        met.listener = full
        full.bind((LOOPBACK, 0))
        full.listen(8)
        found = met.waits(1)
        with met.as_rank(1), found.result()[1]:
            assert full.tries > 3


def test_who_does_not_come_is_named(met: Met) -> None:
    with pytest.raises(LaunchError, match="rank 3, 5 did not call in time"):
        accept(met.listener, KEY, {3, 5}, time.monotonic())
