"""Whether shaped links carry what they should: TCP through plain sockets, in four patterns."""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from benchmarks.emulated.namespaces import inside

Host = tuple[str, str]
"""A namespace, and its address."""

Pair = tuple[socket.socket, socket.socket]
"""The two ends of a connection: who sends, who receives."""


def link_shares(
    hosts: Sequence[Host], rate_bits_per_s: int, seconds: float = 1.0
) -> dict[str, float]:
    """TCP's payload as a share of the rate of the links that it fills, pattern by pattern.

    0.956 is the most that lasts: 1448 bytes of payload in each 1514 on the link.
    """
    numbers = range(len(hosts))
    patterns = {
        "one pair": [(0, 1)],
        "one pair, both ways": [(0, 1), (1, 0)],
        "ring": [(host, (host + 1) % len(hosts)) for host in numbers],
        "incast": [(host, 0) for host in numbers[1:]],
    }
    shares = {}
    for name, flows in patterns.items() if len(hosts) > 1 else ():
        links = len({receiver for _, receiver in flows})
        pairs = [_connect(hosts[sender], hosts[receiver]) for sender, receiver in flows]
        shares[name] = _payload_bits_per_s(pairs, seconds) / (rate_bits_per_s * links)
    return shares


def _connect(sender: Host, receiver: Host) -> Pair:
    with inside(receiver[0], lambda: socket.create_server((receiver[1], 0))) as server:
        address = server.getsockname()
        near = inside(sender[0], lambda: socket.create_connection(address))
        return near, server.accept()[0]


def _payload_bits_per_s(pairs: Sequence[Pair], seconds: float) -> float:
    # By then the buckets' first content has gone, and TCP has found its speed.
    begin = time.monotonic() + 0.3
    with ThreadPoolExecutor(2 * len(pairs)) as pool:
        counts = [pool.submit(_receive, far, begin, begin + seconds) for _, far in pairs]
        for near, _ in pairs:
            pool.submit(_send, near)
        return 8 * sum(count.result() for count in counts) / seconds


def _send(connection: socket.socket) -> None:
    block = bytes(1 << 18)
    with connection, suppress(OSError):  # the receiver has seen enough
        while True:
            connection.sendall(block)


def _receive(connection: socket.socket, begin: float, end: float) -> int:
    """Bytes that came between two moments."""
    total = 0
    with connection, suppress(TimeoutError):
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            count = len(connection.recv(1 << 18))
            if begin <= time.monotonic() < end:
                total += count
    return total
