"""Ports that connections share: how long messages take that are under way at once.

What is between two ranks is a connection, whose messages go one after the other. Connections that
leave by one port take turns, block by block, as TCP's do: who has two messages to send has both
there at the end, and neither sooner. Each has a window of so many blocks under way. What arrives
at a port goes through it in the order in which it came; a block may come in as it goes out.

Where a switch drops what its queue cannot hold, and TCP makes up for the loss, a port that k
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

from firecaffe.plan.network import Network, Port

BLOCK_BYTES = 15_928
"""In which connections take turns: 11 segments of Ethernet. TCP hands 16 to 64 kB to a network card
at a time."""

MOST_BLOCKS = 9
"""Of a message. A longer one has longer blocks, or there would be millions."""

WINDOW = 2
"""Blocks of one connection under way at once."""


class Clock:
    """What happens at which time, in seconds; of what happens at one time, the first said first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happens))

    def run(self) -> None:
        """Until nothing is to happen any more."""
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()


@dataclass(frozen=True, slots=True)
class _Message:
    blocks: int
    block_s: float
    """That a block takes to leave; `last_s`: the last one, which may be shorter."""
    last_s: float
    crowding: float
    """How many times as long it takes to arrive."""
    arrived: Callable[[], None]


@dataclass(slots=True)
class _Connection:
    out: Port
    into: Port
    waiting: deque[_Message] = field(default_factory=deque)
    sent: int = 0
    """Blocks of the first message that waits."""
    under_way: int = 0
    """Blocks that are in line, or have left and not arrived."""


class Ports:
    """The ports of a network, and what waits for them."""

    def __init__(self, network: Network, clock: Clock) -> None:
        self._network = network
        self._clock = clock
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._line: dict[Port, deque[tuple[_Connection, _Message, bool]]] = defaultdict(deque)
        self._is_busy: dict[Port, bool] = defaultdict(bool)
        self._free_s: dict[Port, float] = defaultdict(float)
        """When what has arrived at a port is through."""

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
            self._connections[ends] = _Connection(*self._network.ports(*ends))
        rate = self._network.link(*ends).bandwidth_bytes_per_s
        length = max(BLOCK_BYTES, num_bytes / MOST_BLOCKS)
        blocks = max(1, ceil(num_bytes / length - 1e-9))
        last_s = (num_bytes - (blocks - 1) * length) / rate
        message = _Message(blocks, length / rate, last_s, crowding, arrived)
        self._connections[ends].waiting.append(message)
        self._ask(self._connections[ends])

    def _ask(self, connection: _Connection) -> None:
        """As many blocks get in line as may be under way."""
        while connection.waiting and connection.under_way < WINDOW:
            message = connection.waiting[0]
            connection.sent += 1
            connection.under_way += 1
            is_last = connection.sent == message.blocks
            if is_last:
                connection.waiting.popleft()
                connection.sent = 0
            self._line[connection.out].append((connection, message, is_last))
        self._serve(connection.out)

    def _serve(self, port: Port) -> None:
        """The next block in line leaves."""
        if self._is_busy[port] or not self._line[port]:
            return
        connection, message, is_last = self._line[port].popleft()
        taken_s = message.last_s if is_last else message.block_s
        self._is_busy[port] = True

        def leave() -> None:
            self._is_busy[port] = False
            # It came in as it went out, if the port was free.
            begun_s = max(self._free_s[connection.into], self._clock.now_s - taken_s)
            self._free_s[connection.into] = begun_s + taken_s * message.crowding
            self._clock.at(self._free_s[connection.into], arrive)
            self._serve(port)

        def arrive() -> None:
            connection.under_way -= 1
            self._ask(connection)
            if is_last:
                message.arrived()

        self._clock.at(self._clock.now_s + taken_s, leave)


def crowding(congestion: float, senders: float) -> float:
    """How many times longer a transfer takes into a port that so many senders want to fill."""
    return 1 + congestion * (log2(max(1.0, senders) + 1) - 1)
