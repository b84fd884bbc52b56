"""The time of an exchange: its schedule run on ports, block by block.

A rank does what `comm.execute` does: it works through its rounds, piece by piece, sends a round's
messages as soon as those of its round before have arrived, and adds what it was to add. What is
between two ranks is a connection, whose messages go one after the other. Connections that leave by
one port take turns, block by block, as TCP's do: who has two messages to send has both there at
the end, and neither sooner. Each has a window of so many blocks under way. What arrives at a port
goes through it in the order in which it came; a block may come in as it goes out.

A message arrives latency_s after its last byte. A rank starts one message in latency_s, and takes
one in: where they are short, latencies follow each other, and where they are long, they are hidden.

Where a switch drops what its queue cannot hold, and TCP makes up for the loss, a port that k
senders want to fill takes 1 + congestion · (lg(k + 1) - 1) times as long. (A sender counts by the
share of its own port that it gives to that destination.) The form is an observation: a server's
port behind a queue of 1 MB with k = 3, 7 and 15 took 1.14, 1.28 and 1.43 times as long.

Source: the model of latency and bandwidth of Thakur, Rabenseifner and Gropp 2005, with ports.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import ceil, log2
from typing import Any

from firecaffe.exchange.pieces import pieces
from firecaffe.exchange.schedule import Round, Schedule
from firecaffe.plan.network import Network, Port

_Step = tuple[int, int]
"""(round, piece)."""

BLOCK_BYTES = 15_928
"""In which connections take turns: what TCP hands to a network card at a time is 16 to 64 kB."""

MOST_BLOCKS = 9
"""Of a message. A longer one has longer blocks, or there would be millions."""

WINDOW = 2
"""Blocks of one connection under way at once."""


@dataclass(frozen=True)
class _Message:
    """One transfer of one piece, from one actor (a rank in a lane) to another."""

    step: _Step
    source: int
    destination: int
    blocks: int
    block_s: float
    """That a block takes to leave; `last_s`: the last one, which is shorter."""
    last_s: float
    crowding: float
    """How many times as long it takes to arrive."""
    latency_s: float


@dataclass
class _Connection:
    """From one rank to another. waiting: each message with the blocks that it has yet to send."""

    out: Port
    into: Port
    waiting: deque[list[_Message | int]] = field(default_factory=deque)
    under_way: int = 0
    has_turn: bool = False
    """Whether it waits for its turn at its port."""


def simulate_s(
    schedule: Callable[[int, int], Schedule],
    network: Network,
    num_elements: int,
    bytes_per_element: int = 4,
    in_pieces: bool = True,
    vectors: int = 1,
) -> float:
    """Seconds from all ranks' start to the last one's end.

    in_pieces: as our own executor cuts the vector; else whole, as FireCaffe's tree. vectors: so
    many at once, each in a lane of its own: a rank works through its rounds for itself.
    """
    world_size = network.world_size
    whole = schedule(world_size, num_elements)
    parts = pieces(whole, bytes_per_element) if in_pieces else [(0, num_elements)]
    by_length = {stop - start: schedule(world_size, stop - start) for start, stop in parts}
    schedules = [by_length[stop - start] for start, stop in parts]
    return _Run(schedules, network, bytes_per_element, vectors).run()


class _Run:
    """The state of one simulation. A rank's part in a lane is an actor of its own."""

    def __init__(
        self, schedules: Sequence[Schedule], network: Network, itemsize: int, lanes: int = 1
    ) -> None:
        self.network = network
        self.itemsize = itemsize
        self.sends: dict[tuple[int, _Step], list[_Message]] = defaultdict(list)
        self.missing: dict[tuple[int, _Step], int] = Counter()
        self.adds_s: dict[tuple[int, _Step], float] = defaultdict(float)
        steps: dict[int, set[_Step]] = defaultdict(set)
        for lane in range(lanes):
            for piece, schedule in enumerate(schedules):
                for number, round_ in enumerate(schedule.rounds):
                    self._plan(round_, (number, piece), lane * network.world_size, steps)
        self.program = {actor: sorted(own) for actor, own in steps.items()}
        self.first: list[tuple[int, _Step]] = []
        self.own_next: dict[tuple[int, _Step], _Step] = {}
        for actor, own in self.program.items():
            for piece in range(len(schedules)):
                of_piece = [step for step in own if step[1] == piece]
                self.first += [(actor, step) for step in of_piece[:1]]
                for step, following in pairwise(of_piece):
                    self.own_next[actor, step] = following
        self.place = dict.fromkeys(self.program, 0)
        self.clock_s = dict.fromkeys(self.program, 0.0)
        self.arrived_s: dict[tuple[int, _Step], float] = defaultdict(float)
        self.started_s: dict[int, float] = defaultdict(float)
        """By rank: when it may start its next message; `taken_s`: take in the next."""
        self.taken_s: dict[int, float] = defaultdict(float)
        self.connections: dict[tuple[int, int], _Connection] = {}
        self.turns: dict[Port, deque[_Connection]] = defaultdict(deque)
        self.is_busy: dict[Port, bool] = defaultdict(bool)
        self.free_s: dict[Port, float] = defaultdict(float)
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()

    def _plan(self, round_: Round, step: _Step, first: int, steps: dict[int, set[_Step]]) -> None:
        """One round of one piece. first: the actor of rank 0 in its lane."""
        degree = Counter(t.source for t in round_)
        wanted: dict[int, float] = defaultdict(float)
        for t in round_:
            wanted[t.destination] += 1 / degree[t.source]
        ranks = self.network.world_size
        for t in sorted(round_, key=lambda t: (t.destination - t.source) % ranks):
            link = self.network.link(t.source, t.destination)
            sent_bytes = t.num_elements * self.itemsize
            length = max(BLOCK_BYTES, sent_bytes / MOST_BLOCKS)
            blocks = max(1, ceil(sent_bytes / length - 1e-9))
            block_s = length / link.bandwidth_bytes_per_s
            last_s = sent_bytes / link.bandwidth_bytes_per_s - (blocks - 1) * block_s
            crowd = crowding(link.congestion, wanted[t.destination])
            actors = first + t.source, first + t.destination
            message = _Message(step, *actors, blocks, block_s, last_s, crowd, link.latency_s)
            self.sends[actors[0], step].append(message)
            self.missing[actors[1], step] += 1
            if t.reduce:
                self.adds_s[actors[1], step] += link.addition_s_per_byte * sent_bytes
            for actor in actors:
                steps[actor].add(step)

    def run(self) -> float:
        for actor, step in self.first:
            self._begin(actor, step)
        for actor in self.program:
            self._go_on(actor)
        while self.events:
            self.now_s, _, happens, what = heapq.heappop(self.events)
            happens(*what)
        return max(self.now_s, 0.0, *self.clock_s.values())

    def _at(self, time_s: float, happens: Callable[..., None], *what: Any) -> None:
        heapq.heappush(self.events, (time_s, next(self.numbers), happens, what))

    def _begin(self, actor: int, step: _Step) -> None:
        """Starts the messages of a step, one in each latency."""
        rank = actor % self.network.world_size
        for message in self.sends.get((actor, step), ()):
            start_s = max(self.clock_s[actor], self.started_s[rank])
            self.started_s[rank] = start_s + message.latency_s
            self._at(start_s, self._send, message)

    def _send(self, message: _Message) -> None:
        ranks = self.network.world_size
        ends = message.source % ranks, message.destination % ranks
        if ends not in self.connections:
            self.connections[ends] = _Connection(*self.network.ports(*ends))
        connection = self.connections[ends]
        connection.waiting.append([message, message.blocks])
        self._ask(connection)

    def _ask(self, connection: _Connection) -> None:
        """A connection gets in line for its turn, where it has something to send and may."""
        if connection.waiting and connection.under_way < WINDOW and not connection.has_turn:
            connection.has_turn = True
            self.turns[connection.out].append(connection)
            self._serve(connection.out)

    def _serve(self, port: Port) -> None:
        """The next block of the connection whose turn it is."""
        if self.is_busy[port] or not self.turns[port]:
            return
        connection = self.turns[port].popleft()
        connection.has_turn = False
        message, left = connection.waiting[0]
        connection.waiting[0][1] = left - 1
        if left == 1:
            connection.waiting.popleft()
        connection.under_way += 1
        self.is_busy[port] = True
        taken_s = message.block_s if left > 1 else message.last_s
        self._at(self.now_s + taken_s, self._leave, connection, message, taken_s, left == 1)
        self._ask(connection)

    def _leave(
        self, connection: _Connection, message: _Message, taken_s: float, is_last: bool
    ) -> None:
        self.is_busy[connection.out] = False
        # It came in as it went out, if the port was free.
        begun_s = max(self.free_s[connection.into], self.now_s - taken_s)
        self.free_s[connection.into] = begun_s + taken_s * message.crowding
        self._at(self.free_s[connection.into], self._arrive, connection, message, is_last)
        self._serve(connection.out)

    def _arrive(self, connection: _Connection, message: _Message, is_last: bool) -> None:
        connection.under_way -= 1
        self._ask(connection)
        if is_last:
            rank = message.destination % self.network.world_size
            self.taken_s[rank] = max(self.now_s, self.taken_s[rank]) + message.latency_s
            self._at(self.taken_s[rank], self._take, message)

    def _take(self, message: _Message) -> None:
        key = message.destination, message.step
        self.arrived_s[key] = self.now_s
        self.missing[key] -= 1
        if not self.missing[key]:
            self._go_on(message.destination)

    def _go_on(self, actor: int) -> None:
        """Works through the actor's steps as far as messages have arrived."""
        program = self.program[actor]
        while self.place[actor] < len(program):
            key = actor, program[self.place[actor]]
            if self.missing[key]:
                return
            begun_s = max(self.clock_s[actor], self.arrived_s[key])
            self.clock_s[actor] = begun_s + self.adds_s[key]
            self.place[actor] += 1
            if key in self.own_next:
                self._begin(actor, self.own_next[key])


def crowding(congestion: float, senders: float) -> float:
    """How many times longer a transfer takes into a port that so many senders want to fill."""
    return 1 + congestion * (log2(max(1.0, senders) + 1) - 1)
