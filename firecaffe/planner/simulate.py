"""Simulates an exchange: runs its schedule on ports that connections share.

Rank r is on device r, and devices fill the innermost groups first, as launchers number ranks. Two
ranks meet at the innermost link that joins them; device i of a group uses port i mod ports there.

A rank works through its rounds piece by piece, as `transport.execute` does. It sends a round's
messages when those of the round before have arrived and been added. A message arrives latency_s
after its last byte, and a rank starts, and receives, at most one message in each latency_s.

Messages between two ranks form a connection and travel in sequence. Connections that leave by one
port take turns block by block, as TCP's do, each with a window of blocks in flight. Blocks pass an
arriving port in order of arrival, and may enter it while they leave.

If a switch drops what its queue cannot hold, a port that k senders want to fill takes 1 +
congestion · (lg(k + 1) - 1) times as long. A sender counts by the share of its port that it gives
to that destination. The formula is empirical: a server's port behind a queue of 1 MB took 1.14,
1.28 and 1.43 times as long with k = 3, 7 and 15.

Source: the model of latency and bandwidth of Thakur, Rabenseifner and Gropp 2005, on ports.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, pairwise
from math import ceil, log2
from typing import Any, TypeVar

from firecaffe.exchange.schedule import BYTES_PER_ELEMENT, Round, Schedule, pieces
from firecaffe.planner.cluster import Link

Port = tuple[int, str, int, int]
"""(number of the link, "out" or "in", group, number in the group)."""


@dataclass(frozen=True)
class Network:
    links: tuple[Link, ...]
    world_size: int

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The number of devices in the groups that each link joins."""
        return (1, *(link.group for link in self.links[:-1]))

    @cached_property
    def fills_groups(self) -> bool:
        """Whether every group that is used has all its ranks."""
        return all(self.world_size % devices == 0 for devices in self.inner)

    def level(self, first: int, second: int) -> int:
        """The number of the innermost link that joins two ranks."""
        for number, link in enumerate(self.links):
            if not link.group or first // link.group == second // link.group:
                return number
        raise AssertionError("the last link joins all")

    def link(self, first: int, second: int) -> Link:
        return self.links[self.level(first, second)]

    @property
    def outermost(self) -> Link:
        """The innermost link that joins all ranks."""
        return self.link(0, self.world_size - 1)

    def agreement_s(self, ranks: int) -> float:
        """Seconds in which the first `ranks` ranks exchange a few numbers.

        Their messages go round a ring, as in Gloo's all-gather.
        """
        return (ranks - 1) * self.link(0, ranks - 1).latency_s if ranks > 1 else 0.0

    def ports(self, source: int, destination: int) -> tuple[Port, Port]:
        level = self.level(source, destination)
        inner, count = self.inner[level], self.links[level].ports
        out = level, "out", source // inner, source % inner % count
        into = level, "in", destination // inner, destination % inner % count
        return out, into

    def strided(self, stride: int) -> "Network":
        """The network that a set of every stride-th rank sees while all `stride` sets exchange.

        Each of its ranks stands for `stride` neighboring ranks. Raises: ValueError if these neither
        fill nor divide groups.
        """
        if stride == 1:
            return self
        links = []
        for link, inner in zip(self.links, self.inner, strict=True):
            if link.group and max(link.group, stride) % min(link.group, stride):
                raise ValueError(f"{stride} ranks in a row, and {link.name} joins {link.group}")
            if link.group and link.group <= stride:
                continue  # it joins no two ranks of one set
            sharing = min(inner, stride)
            times = max(1, sharing // link.ports)
            links.append(
                replace(
                    link,
                    group=link.group // stride,
                    ports=max(1, link.ports // sharing) if inner > stride else 1,
                    latency_s=link.latency_s * times,
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times,
                    memory_bytes_per_s=0.0,
                )
            )
        return Network(tuple(links), self.world_size // stride)


T = TypeVar("T")

BLOCK_BYTES = 15_928
"""Block size of connections, 11 Ethernet segments; TCP passes 16 to 64 kB to a card at a time."""

MAX_BLOCKS = 9
"""The most blocks of this size in a message: 128 kB, as segments have."""
LONG_BLOCKS = 4
"""Blocks of a larger message; they are longer, so that their number stays small."""

WINDOW = 2
"""Blocks of one connection in flight at once."""


class EventClock:
    """Runs events by their time in seconds; events of equal time run in the order of `at`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()

    def at(self, time_s: float, happens: Callable[[T], None], what: T) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happens, what))

    def run(self) -> None:
        while self._events:
            self.now_s, _, happens, what = heapq.heappop(self._events)
            happens(what)


@dataclass(frozen=True, slots=True)
class _QueuedMessage:
    blocks: int
    block_s: float
    """Seconds to send a block; the last one may be shorter."""
    last_s: float
    crowding: float
    arrived: Callable[[], None]


@dataclass(slots=True)
class _Port:
    line: deque["_Block"] = field(default_factory=deque)
    is_busy: bool = False
    free_s: float = 0.0
    """The time at which all arrived blocks have passed."""


@dataclass(slots=True)
class _Connection:
    out: _Port
    into: _Port
    rate: float
    waiting: deque[_QueuedMessage] = field(default_factory=deque)
    sent: int = 0
    """Blocks sent of the first waiting message."""
    under_way: int = 0
    """Blocks that are in line, or have left and not arrived."""


_Block = tuple[_Connection, _QueuedMessage, float, bool]
"""(connection, message, seconds to send it, whether it is the message's last block)."""


class Ports:
    def __init__(self, network: Network, clock: EventClock) -> None:
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
        """Queue a message on the connection of two ranks. arrived: called after its last byte."""
        ends = source, destination
        if ends not in self._connections:
            out, into = (self._ports[port] for port in self._network.ports(*ends))
            rate = self._network.link(*ends).bandwidth_bytes_per_s
            self._connections[ends] = _Connection(out, into, rate)
        connection = self._connections[ends]
        is_long = num_bytes > MAX_BLOCKS * BLOCK_BYTES
        length = num_bytes / LONG_BLOCKS if is_long else BLOCK_BYTES
        blocks = max(1, ceil(num_bytes / length - 1e-9))
        last_s = (num_bytes - (blocks - 1) * length) / connection.rate
        message = _QueuedMessage(blocks, length / connection.rate, last_s, crowding, arrived)
        connection.waiting.append(message)
        self._fill_window(connection)

    def _fill_window(self, connection: _Connection) -> None:
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
        if port.line and not port.is_busy:
            block = port.line.popleft()
            port.is_busy = True
            self._clock.at(self._clock.now_s + block[2], self._leave, block)

    def _leave(self, block: _Block) -> None:
        connection, message, taken_s, _ = block
        connection.out.is_busy = False
        # If the port was free, the block arrived while it left.
        begun_s = max(connection.into.free_s, self._clock.now_s - taken_s)
        connection.into.free_s = begun_s + taken_s * message.crowding
        self._clock.at(connection.into.free_s, self._arrive, block)
        self._serve(connection.out)

    def _arrive(self, block: _Block) -> None:
        connection, message, _, is_last = block
        connection.under_way -= 1
        self._fill_window(connection)
        if is_last:
            message.arrived()


def crowding(congestion: float, senders: float) -> float:
    """The factor by which a transfer slows down at a port that so many senders want to fill."""
    return 1 + congestion * (log2(max(1.0, senders) + 1) - 1)


_Step = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Message:
    """One piece of a transfer, from one actor (a rank in a lane) to another."""

    step: _Step
    source: int
    destination: int
    num_bytes: int
    crowding: float
    latency_s: float


def simulate_s(
    schedule: Callable[[int, int], Schedule],
    network: Network,
    num_elements: int,
    in_pieces: bool = True,
    vectors: int = 1,
) -> float:
    """Seconds from the common start of all ranks to the end of the last one.

    in_pieces: cut the vector as our executor does; else whole, as FireCaffe's tree. vectors: how
    many are in flight at once, each in a lane whose rounds ranks run independently of other lanes.
    """
    world_size = network.world_size
    whole = schedule(world_size, num_elements)
    parts = pieces(whole, BYTES_PER_ELEMENT) if in_pieces else [(0, num_elements)]
    by_length = {stop - start: schedule(world_size, stop - start) for start, stop in parts}
    schedules = [by_length[stop - start] for start, stop in parts]
    return _Run(schedules, network, vectors).run()


class _Run:
    def __init__(self, schedules: Sequence[Schedule], network: Network, lanes: int) -> None:
        self.network = network
        self.clock = EventClock()
        self.ports = Ports(network, self.clock)
        self.sends: dict[tuple[int, _Step], list[_Message]] = defaultdict(list)
        self.missing: dict[tuple[int, _Step], int] = Counter()
        self.adds_s: dict[tuple[int, _Step], float] = defaultdict(float)
        steps: dict[int, set[_Step]] = defaultdict(set)
        for lane in range(lanes):
            for piece, schedule in enumerate(schedules):
                for number, round_ in enumerate(schedule.rounds):
                    self._plan(round_, (number, piece), lane * network.world_size, steps)
        self.program = {actor: sorted(actor_steps) for actor, actor_steps in steps.items()}
        self.first: list[tuple[int, _Step]] = []
        self.own_next: dict[tuple[int, _Step], _Step] = {}
        for actor, actor_steps in self.program.items():
            for piece in range(len(schedules)):
                of_piece = [step for step in actor_steps if step[1] == piece]
                self.first += [(actor, step) for step in of_piece[:1]]
                for step, following in pairwise(of_piece):
                    self.own_next[actor, step] = following
        self.place = dict.fromkeys(self.program, 0)
        self.done_s = dict.fromkeys(self.program, 0.0)
        self.arrived_s: dict[tuple[int, _Step], float] = defaultdict(float)
        self.starts_s: dict[int, float] = defaultdict(float)
        """When each rank may start its next message; `takes_s`: when it may receive the next."""
        self.takes_s: dict[int, float] = defaultdict(float)

    def _plan(self, round_: Round, step: _Step, first: int, steps: dict[int, set[_Step]]) -> None:
        degree = Counter(t.source for t in round_)
        wanted: dict[int, float] = defaultdict(float)
        for t in round_:
            wanted[t.destination] += 1 / degree[t.source]
        ranks = self.network.world_size
        for t in sorted(round_, key=lambda t: (t.destination - t.source) % ranks):
            link = self.network.link(t.source, t.destination)
            num_bytes = t.num_elements * BYTES_PER_ELEMENT
            actors = first + t.source, first + t.destination
            crowd = crowding(link.congestion, wanted[t.destination])
            message = _Message(step, *actors, num_bytes, crowd, link.latency_s)
            self.sends[actors[0], step].append(message)
            self.missing[actors[1], step] += 1
            if t.reduce:
                self.adds_s[actors[1], step] += link.addition_s_per_byte * num_bytes
            for actor in actors:
                steps[actor].add(step)

    def run(self) -> float:
        for actor, step in self.first:
            self._begin(actor, step)
        for actor in self.program:
            self._advance(actor)
        self.clock.run()
        return max(self.clock.now_s, *self.done_s.values(), 0.0)

    def _begin(self, actor: int, step: _Step) -> None:
        rank = actor % self.network.world_size
        for message in self.sends.get((actor, step), ()):
            start_s = max(self.done_s[actor], self.starts_s[rank])
            self.starts_s[rank] = start_s + message.latency_s
            self.clock.at(start_s, self._send, message)

    def _send(self, message: _Message) -> None:
        ranks = self.network.world_size
        ends = message.source % ranks, message.destination % ranks
        arrived = partial(self._arrive, message)
        self.ports.send(*ends, message.num_bytes, message.crowding, arrived)

    def _arrive(self, message: _Message) -> None:
        self.clock.at(self.clock.now_s + message.latency_s, self._receive, message)

    def _receive(self, message: _Message) -> None:
        rank = message.destination % self.network.world_size
        self.takes_s[rank] = max(self.clock.now_s, self.takes_s[rank] + message.latency_s)
        self.clock.at(self.takes_s[rank], self._take, message)

    def _take(self, message: _Message) -> None:
        key = message.destination, message.step
        self.arrived_s[key] = self.clock.now_s
        self.missing[key] -= 1
        if not self.missing[key]:
            self._advance(message.destination)

    def _advance(self, actor: int) -> None:
        program = self.program[actor]
        while self.place[actor] < len(program):
            key = actor, program[self.place[actor]]
            if self.missing[key]:
                return
            self.done_s[actor] = max(self.done_s[actor], self.arrived_s[key]) + self.adds_s[key]
            self.place[actor] += 1
            if key in self.own_next:
                self._begin(actor, self.own_next[key])
