"""Ports that connections share: how long messages take that are under way at once.

What is between two ranks is a connection, whose messages go one after the other. Connections that
leave by one port take turns, block by block, as TCP's do: who has two messages to send has both
there at the end, and neither sooner. Each has a window of so many blocks under way. What arrives
at a port goes through it in the order in which it came; a block may come in as it goes out.

If a switch drops what its queue cannot hold, and TCP makes up for the loss, a port that k
senders want to fill takes 1 + congestion · (lg(k + 1) - 1) times as long. (A sender counts by the
share of its own port that it gives to that destination.) The form is an observation: a server's
port behind a queue of 1 MB with k = 3, 7 and 15 took 1.14, 1.28 and 1.43 times as long.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import ceil, log2
from typing import Any, TypeVar

from firecaffe.plan.network import Network, Port

T = TypeVar("T")

BLOCK_BYTES = 15_928
"""Size of the blocks in which connections take turns: 11 segments of Ethernet. TCP hands 16 to 64
kB to a network card at a time.
"""

MOST_BLOCKS = 9
"""Blocks of a message of such blocks: 128 kB, as segments are."""
LONG_BLOCKS = 4
"""Blocks of a longer message: they are longer, or there would be millions."""

WINDOW = 2
"""Blocks of one connection under way at once."""


class Clock:
    """What happens at which time, in seconds; of what happens at one time, the first said first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Callable[[T], None], what: T) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happens, what))

    def run(self) -> None:
        """Until nothing is to happen any more."""
        while self._events:
            self.now_s, _, happens, what = heapq.heappop(self._events)
            happens(what)


@dataclass(frozen=True, slots=True)
class _Message:
    blocks: int
    block_s: float
    """Time that a block takes to leave; `last_s`: the last one, which may be shorter."""
    last_s: float
    crowding: float
    """How many times as long it takes to arrive."""
    arrived: Callable[[], None]


@dataclass(slots=True)
class _Port:
    """One way of it."""

    line: deque["_Block"] = field(default_factory=deque)
    is_busy: bool = False
    free_s: float = 0.0
    """When what has arrived is through."""


@dataclass(slots=True)
class _Connection:
    out: _Port
    into: _Port
    rate: float
    waiting: deque[_Message] = field(default_factory=deque)
    sent: int = 0
    """Blocks of the first message that waits."""
    under_way: int = 0
    """Blocks that are in line, or have left and not arrived."""


_Block = tuple[_Connection, _Message, float, bool]
"""(its connection, its message, seconds that it takes to leave, whether it is the last)."""


class Ports:
    """The ports of a network, and what waits for them."""

    def __init__(self, network: Network, clock: Clock) -> None:
        self._network = network
        self._clock = clock
        self._ports: dict[Port, _Port] = defaultdict(_Port)
        self._connections: dict[tuple[int, int], _Connection] = {}

    def send(
        self,
        source: int,
        destination: int,
        num_bytes: int,
        crowding: float,
        arrived: Callable[[], None],
    ) -> None:
        """Puts a message on the connection of two ranks. arrived: called with its last byte."""
        ends = source, destination
        if ends not in self._connections:
            out, into = (self._ports[port] for port in self._network.ports(*ends))
            rate = self._network.link(*ends).bandwidth_bytes_per_s
            self._connections[ends] = _Connection(out, into, rate)
        connection = self._connections[ends]
        is_long = num_bytes > MOST_BLOCKS * BLOCK_BYTES
        length = num_bytes / LONG_BLOCKS if is_long else BLOCK_BYTES
        blocks = max(1, ceil(num_bytes / length - 1e-9))
        last_s = (num_bytes - (blocks - 1) * length) / connection.rate
        message = _Message(blocks, length / connection.rate, last_s, crowding, arrived)
        connection.waiting.append(message)
        self._ask(connection)

    def _ask(self, connection: _Connection) -> None:
        """Gets as many blocks in line as may be under way."""
        while connection.waiting and connection.under_way < WINDOW:
            message = connection.waiting[0]
            connection.sent += 1
            connection.under_way += 1
            is_last = connection.sent == message.blocks
            if is_last:
                connection.waiting.popleft()
                connection.sent = 0
            taken_s = message.last_s if is_last else message.block_s
            connection.out.line.append((connection, message, taken_s, is_last))
        self._serve(connection.out)

    def _serve(self, port: _Port) -> None:
        """The next block in line begins to leave."""
        if port.line and not port.is_busy:
            block = port.line.popleft()
            port.is_busy = True
            self._clock.at(self._clock.now_s + block[2], self._leave, block)

    def _leave(self, block: _Block) -> None:
        connection, message, taken_s, _ = block
        connection.out.is_busy = False
        # It came in as it went out, if the port was free.
        begun_s = max(connection.into.free_s, self._clock.now_s - taken_s)
        connection.into.free_s = begun_s + taken_s * message.crowding
        self._clock.at(connection.into.free_s, self._arrive, block)
        self._serve(connection.out)

    def _arrive(self, block: _Block) -> None:
        connection, message, _, is_last = block
        connection.under_way -= 1
        self._ask(connection)
        if is_last:
            message.arrived()


def crowding(congestion: float, senders: float) -> float:
    """How many times longer a transfer takes into a port that so many senders want to fill."""
    return 1 + congestion * (log2(max(1.0, senders) + 1) - 1)
