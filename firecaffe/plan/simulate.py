"""The time of an exchange: its schedule run on ports that connections share.

A rank does what `transport.execute` does: it works through its rounds, piece by piece, sends a
round's messages as soon as those of its round before have arrived, and adds what it was to add. A
message arrives latency_s after its last byte. A rank starts one message in latency_s, and takes
one in: if they are short, latencies follow each other, and if they are long, they are hidden.

Source: the model of latency and bandwidth of Thakur, Rabenseifner and Gropp 2005, on `plan.ports`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from firecaffe.exchange.pieces import pieces
from firecaffe.exchange.schedule import Round, Schedule
from firecaffe.plan.network import Network
from firecaffe.plan.ports import Clock, Ports, crowding

_Step = tuple[int, int]
"""(round, piece)."""


@dataclass(frozen=True, slots=True)
class _Message:
    """One transfer of one piece, from one actor (a rank in a lane) to another."""

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
        self, schedules: Sequence[Schedule], network: Network, itemsize: int, lanes: int
    ) -> None:
        self.network = network
        self.itemsize = itemsize
        self.clock = Clock()
        self.ports = Ports(network, self.clock)
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
        self.done_s = dict.fromkeys(self.program, 0.0)
        """When each actor was through with its last step."""
        self.arrived_s: dict[tuple[int, _Step], float] = defaultdict(float)
        self.starts_s: dict[int, float] = defaultdict(float)
        """When each rank may start its next message; `takes_s`: when it may take in the next."""
        self.takes_s: dict[int, float] = defaultdict(float)

    def _plan(self, round_: Round, step: _Step, first: int, steps: dict[int, set[_Step]]) -> None:
        """One round of one piece. first: the actor of rank 0 in its lane."""
        degree = Counter(t.source for t in round_)
        wanted: dict[int, float] = defaultdict(float)
        for t in round_:
            wanted[t.destination] += 1 / degree[t.source]
        ranks = self.network.world_size
        for t in sorted(round_, key=lambda t: (t.destination - t.source) % ranks):
            link = self.network.link(t.source, t.destination)
            num_bytes = t.num_elements * self.itemsize
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
            self._go_on(actor)
        self.clock.run()
        return max(self.clock.now_s, *self.done_s.values(), 0.0)

    def _begin(self, actor: int, step: _Step) -> None:
        """Starts the messages of a step, one in each latency."""
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
        rank = message.destination % self.network.world_size
        self.takes_s[rank] = max(self.clock.now_s, self.takes_s[rank]) + message.latency_s
        self.clock.at(self.takes_s[rank], self._take, message)

    def _take(self, message: _Message) -> None:
        key = message.destination, message.step
        self.arrived_s[key] = self.clock.now_s
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
            self.done_s[actor] = max(self.done_s[actor], self.arrived_s[key]) + self.adds_s[key]
            self.place[actor] += 1
            if key in self.own_next:
                self._begin(actor, self.own_next[key])
