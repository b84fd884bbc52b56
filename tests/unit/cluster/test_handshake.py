"""Who is let in by a listener, and who holds up nobody."""

import errno
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from firecaffe.cluster import handshake
from firecaffe.cluster.addresses import LOOPBACK, listen_at
from firecaffe.cluster.handshake import CALL_BYTES, CHALLENGE_BYTES, accept, prove
from firecaffe.errors import LaunchError

KEY = b"k" * 32
LONG_S = 300.0


def soon() -> float:
    return time.monotonic() + LONG_S


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen_at(LOOPBACK, 0, 1024) as listening:
        yield listening


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as made:
        yield made


def called(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname())


def as_rank(listener: socket.socket, rank: int, key: bytes = KEY) -> socket.socket:
    peer = called(listener)
    try:
        prove(peer, key, rank, soon())
    except OSError:
        peer.close()
        raise
    return peer


def waits(
    threads: ThreadPoolExecutor, listener: socket.socket, *ranks: int
) -> "Future[dict[int, socket.socket]]":
    return threads.submit(accept, listener, KEY, {*ranks}, soon())


def test_ranks_that_know_the_key_are_connected(
    listener: socket.socket, threads: ThreadPoolExecutor
) -> None:
    found = waits(threads, listener, 1, 2)
    with as_rank(listener, 2) as second, as_rank(listener, 1) as first:
        first.sendall(b"1")
        second.sendall(b"2")
        to = found.result()
        assert {rank: to[rank].recv(9) for rank in to} == {1: b"1", 2: b"2"}
        for each in to.values():
            each.close()


def test_who_is_silent_holds_up_nobody(
    listener: socket.socket, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than may wait."""
    monkeypatch.setattr(handshake, "MOST_UNPROVED", 4)
    monkeypatch.setattr(handshake, "LEAST_S", 0.0)
    with ExitStack() as strangers:
        silent = [strangers.enter_context(called(listener)) for _ in range(20)]
        found = waits(threads, listener, 1)
        with as_rank(listener, 1), found.result()[1]:
            pass
        for each in silent:  # all are closed
            each.settimeout(LONG_S)
            while each.recv(64):
                pass


def test_who_takes_too_long_is_closed(
    listener: socket.socket, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PROVE_S", 0.05)
    with called(listener) as silent:
        found = waits(threads, listener, 1)
        silent.settimeout(LONG_S)
        assert len(silent.recv(64)) == CHALLENGE_BYTES
        assert silent.recv(64) == b""
        assert not found.done()
        monkeypatch.setattr(handshake, "PROVE_S", LONG_S)
        with as_rank(listener, 1), found.result()[1]:
            pass


@pytest.mark.parametrize(
    "said", [b"", b"x", b"\0" * CALL_BYTES, b"GET / HTTP/1.1\r\n\r\n" * 20], ids=len
)
def test_who_says_something_else_is_closed(
    listener: socket.socket, threads: ThreadPoolExecutor, said: bytes
) -> None:
    found = waits(threads, listener, 1)
    with called(listener) as stranger:
        stranger.sendall(said)
        with suppress(OSError):  # it may be closed by now
            stranger.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=r"no rank of this run|closed|reset"):
            as_rank(listener, 1, key=b"another")
        with as_rank(listener, 1), found.result()[1]:
            pass


def test_a_rank_that_nobody_waits_for_is_not_taken(
    listener: socket.socket, threads: ThreadPoolExecutor
) -> None:
    found = waits(threads, listener, 1)
    with as_rank(listener, 7), as_rank(listener, 1):
        assert found.result().keys() == {1}
        found.result()[1].close()


def test_a_recorded_call_proves_nothing(
    listener: socket.socket, threads: ThreadPoolExecutor
) -> None:
    found = waits(threads, listener, 1, 2)
    with as_rank(listener, 1), called(listener) as again:
        own = b"\1" * CHALLENGE_BYTES
        challenge = again.recv(CHALLENGE_BYTES)
        content = own + handshake.RANK.pack(2)
        again.sendall(content + handshake._mac(KEY, b"calls", challenge[::-1] + content))
        again.settimeout(LONG_S)
        assert again.recv(64) == b""
        with as_rank(listener, 2):
            for each in found.result().values():
                each.close()


def test_who_listens_without_the_key_is_not_believed(
    listener: socket.socket, threads: ThreadPoolExecutor
) -> None:
    calling = threads.submit(as_rank, listener, 1)
    peer, _ = listener.accept()
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


def test_no_descriptor_left_is_waited_out(threads: ThreadPoolExecutor) -> None:
    with Full() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen(8)
        found = waits(threads, listener, 1)
        with as_rank(listener, 1), found.result()[1]:
            assert listener.tries > 3


def test_who_does_not_come_is_named(listener: socket.socket) -> None:
    with pytest.raises(LaunchError, match="rank 3 did not call in time, nor did 1 others"):
        accept(listener, KEY, {3, 5}, time.monotonic())
