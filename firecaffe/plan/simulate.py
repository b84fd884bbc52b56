"""The time of an exchange: its schedule run on ports, transfer by transfer.

A rank does what `comm.execute` does: it works through its rounds, piece by piece, sends a round's
messages as soon as those of its round before have arrived, and adds what it was to add. A transfer
takes latency_s + bytes / bandwidth, and holds the port it leaves by and the port it arrives at for
so long; where two want one port, the one that was ready first goes first. So what shares a port
takes turns, what does not overlaps, and pieces and segments follow each other as they are sent.

Where more senders want to fill a port than one, a switch's queue overflows, and TCP makes up for
the loss: such a transfer takes 1 + congestion · (lg(k + 1) - 1) times as long for k senders. (A
sender counts by the share of its own port that it gives to that destination.) The form is an
observation: a server's port on emulated links with k = 3, 7 and 15 took 1.14, 1.28 and 1.43 times
as long.

Source: the model of latency and bandwidth of Thakur, Rabenseifner and Gropp 2005, with ports.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from firecaffe.exchange.pieces import pieces
from firecaffe.exchange.schedule import Round, Schedule
from firecaffe.plan.network import Network, Port

_Step = tuple[int, int]
"""(round, piece)."""

FIRST = (-1,)
"""Of what happens at one time: a port is free again before new messages ask for it."""


@dataclass(frozen=True)
class _Message:
    """One transfer of one piece."""

    step: _Step
    number: int
    destination: int
    busy_s: float
    ports: tuple[Port, Port]


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
    """The state of one simulation."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        network: Network,
        bytes_per_element: int,
        lanes: int = 1,
    ) -> None:
        self.network = network
        # A rank's part in a lane is an actor of its own; its number says rank and lane.
        self.sends: dict[int, dict[_Step, list[tuple[int, float]]]] = defaultdict(dict)
        self.missing: dict[tuple[int, _Step], int] = Counter()
        self.arrived_s: dict[tuple[int, _Step], float] = defaultdict(float)
        self.adds_s: dict[tuple[int, _Step], float] = defaultdict(float)
        steps: dict[int, set[_Step]] = defaultdict(set)
        for lane in range(lanes):
            first = lane * network.world_size
            for piece, schedule in enumerate(schedules):
                for number, round_ in enumerate(schedule.rounds):
                    self._plan(round_, (number, piece), first, bytes_per_element, steps)
        self.program = {rank: sorted(own) for rank, own in steps.items()}
        self.own_next: dict[tuple[int, _Step], _Step] = {}
        for rank, own in self.program.items():
            for piece in range(len(schedules)):
                of_piece = [step for step in own if step[1] == piece]
                for step, following in pairwise(of_piece):
                    self.own_next[rank, step] = following
        self.place = dict.fromkeys(self.program, 0)
        self.clock_s = dict.fromkeys(self.program, 0.0)
        self.free_s: dict[Port, float] = defaultdict(float)
        self.events: list[tuple[float, tuple[int, ...], _Message | Port]] = []
        self.parked: dict[Port, list[tuple[_Step, int, _Message]]] = defaultdict(list)
        """By the port that they wait for."""
        self.woken: set[Port] = set()
        self.count = 0

    def _plan(
        self,
        round_: Round,
        step: _Step,
        first: int,
        itemsize: int,
        steps: dict[int, set[_Step]],
    ) -> None:
        """One round of one piece. first: the number of rank 0's part in its lane."""
        degree = Counter(t.source for t in round_)
        wanted: dict[int, float] = defaultdict(float)
        for t in round_:
            wanted[t.destination] += 1 / degree[t.source]
        for t in sorted(round_, key=lambda t: (t.destination - t.source) % len(degree)):
            link = self.network.link(t.source, t.destination)
            sent_bytes = t.num_elements * itemsize
            crowd = crowding(link.congestion, wanted[t.destination])
            busy_s = link.latency_s + sent_bytes * crowd / link.bandwidth_bytes_per_s
            source, destination = first + t.source, first + t.destination
            self.sends[source].setdefault(step, []).append((destination, busy_s))
            self.missing[destination, step] += 1
            if t.reduce:
                self.adds_s[destination, step] += link.addition_s_per_byte * sent_bytes
            steps[source].add(step)
            steps[destination].add(step)

    def run(self) -> float:
        for rank, program in self.program.items():
            begun: set[int] = set()
            for step in program:
                if step[1] not in begun:
                    begun.add(step[1])
                    self._begin(rank, step)
        for rank in self.program:
            self._go_on(rank)
        end_s = 0.0
        while self.events:
            now_s, _, item = heapq.heappop(self.events)
            if isinstance(item, _Message):
                self._try(item, now_s)
            else:
                self._free(item, now_s)
            end_s = max(end_s, now_s)
        return max(end_s, *self.clock_s.values(), *self.free_s.values(), 0.0)

    def _try(self, message: _Message, now_s: float) -> bool:
        """Sends it if both ports are free; else it waits for the one that is busy for longer."""
        port = max(message.ports, key=self.free_s.__getitem__)
        if self.free_s[port] > now_s:
            heapq.heappush(self.parked[port], (message.step, message.number, message))
            self._wake(port)
            return False
        stop_s = now_s + message.busy_s
        for port in message.ports:
            self.free_s[port] = stop_s
            if self.parked[port]:
                self._wake(port)
        key = message.destination, message.step
        self.arrived_s[key] = max(self.arrived_s[key], stop_s)
        self.missing[key] -= 1
        if not self.missing[key]:
            self._go_on(message.destination)
        return True

    def _wake(self, port: Port) -> None:
        """Looks again once the port is free."""
        if port not in self.woken:
            self.woken.add(port)
            heapq.heappush(self.events, (self.free_s[port], FIRST, port))

    def _free(self, port: Port, now_s: float) -> None:
        self.woken.discard(port)
        if self.free_s[port] > now_s:
            self._wake(port)
            return
        while self.parked[port]:
            *_, message = heapq.heappop(self.parked[port])
            if self._try(message, now_s):
                break

    def _go_on(self, rank: int) -> None:
        """Works through the rank's steps as far as messages have arrived."""
        program = self.program[rank]
        while self.place[rank] < len(program):
            step = program[self.place[rank]]
            if self.missing[rank, step]:
                return
            arrived_s = self.arrived_s[rank, step]
            self.clock_s[rank] = max(self.clock_s[rank], arrived_s) + self.adds_s[rank, step]
            self.place[rank] += 1
            if (rank, step) in self.own_next:
                self._begin(rank, self.own_next[rank, step])

    def _begin(self, rank: int, step: _Step) -> None:
        for destination, busy_s in self.sends[rank].get(step, ()):
            self.count += 1
            ranks = self.network.world_size
            ports = self.network.ports(rank % ranks, destination % ranks)
            message = _Message(step, self.count, destination, busy_s, ports)
            heapq.heappush(self.events, (self.clock_s[rank], (*step, self.count), message))


def crowding(congestion: float, senders: float) -> float:
    """How many times longer a transfer takes into a port that so many senders want to fill."""
    return 1 + congestion * (log2(max(1.0, senders) + 1) - 1)
