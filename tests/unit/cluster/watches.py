"""Watches as threads of one process, with real sockets between them."""

import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

from firecaffe.cluster.links import Shape, links_of
from firecaffe.cluster.watch import PeerWatch
from firecaffe.faults import Fault

SILENT_S = 0.6
LONG_S = 300.0


def connect() -> tuple[socket.socket, socket.socket]:
    """Over TCP: what a host has acknowledged is asked of the kernel."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def linked(hosts: Sequence[str], shape: Shape = links_of) -> list[dict[int, socket.socket]]:
    """Sockets by rank and by the rank at the other end."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in hosts]
    for first in range(len(hosts)):
        for second in shape(first, hosts).ranks:
            if first < second:
                sockets[first][second], sockets[second][first] = connect()
    return sockets


@contextmanager
def watches(
    size: int,
    watching: Container[int] | None = None,
    silent_s: float = LONG_S,
    hosts: Sequence[str] = (),
    timeout_s: float = LONG_S,
    shape: Shape = links_of,
) -> Iterator[tuple[list[PeerWatch], list[dict[int, socket.socket]]]]:
    """Of all ranks, or of some; the others are sockets in the test's hands."""
    names = list(hosts) or [f"host{rank}" for rank in range(size)]
    sockets = linked(names, shape)
    started = [
        PeerWatch(rank, names, sockets[rank], silent_s, timeout_s, shape)
        for rank in range(size)
        if watching is None or rank in watching
    ]
    try:
        yield started, sockets
    finally:
        for each in started:
            each.close()
        for of_rank in sockets:
            for one in of_rank.values():
                one.close()


def fault_of(watch: PeerWatch) -> Fault:
    assert watch._known.wait(LONG_S)
    assert watch.fault is not None
    return watch.fault


def until(is_so: Callable[[], bool]) -> None:
    """Looks every few milliseconds."""
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s
        threading.Event().wait(0.005)
