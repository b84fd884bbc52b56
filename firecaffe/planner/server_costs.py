"""Prices the places where a server keeps its weights, and simulates a planned server's clock.

A work goes through four stages: pull of the weights, computation, push of the gradient, update.
Transfers under way share a port equally, as TCP's connections do. If a port has a queue, one that
begins later first waits for what the others have in it. A worker's processor serves one work at a
time, in order of arrival; worker 0's processor also makes updates. A learner does not pull a
version that it already has.
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from functools import partial

from firecaffe.synchrony.clock import Seconds, SimulatedClock
from firecaffe.synchrony.config import SHARDED, SynchronyConfig
from firecaffe.synchrony.server_policies import Policy, Work

PULL, COMPUTE, PUSH, TAKE = range(4)

PROCESSOR = "processor"

QUEUED_BYTES = 65_536
"""Bytes that a connection has in a port's queue. Linux's TCP begins with a window of this size
(`tcp_rmem`: 131,072 bytes by default, of which half is for data).
"""


@dataclass(frozen=True)
class Costs:
    """The costs of a work besides computing, in the unit of the speeds."""

    pull: float = 0.0
    push: float = 0.0
    take: float = 0.0
    # The number of workers. Learner n belongs to worker n mod `workers`, which computes one work at
    # a time. Worker 0 contains the server and sends nothing. 0: each learner is a worker.
    workers: int = 0
    # Whether each worker serves an equal part of the weights. Then a pull and a push go in parts to
    # and from all others at once, through the ports of both.
    is_sharded: bool = False
    # A transfer's part in a port's queue.
    queued: float = 0.0

    @property
    def owners(self) -> int:
        return self.workers if self.is_sharded else 1

    def sent(self, worker: int, stage: int) -> list[tuple[str, float]]:
        """Return the parts of a pull or a push: a port, and the seconds if it is otherwise idle.

        A message between two owners occupies two ports.
        """
        took, theirs, mine = (self.pull, "out", "in") if stage == PULL else (self.push, "in", "out")
        if not took:
            return []
        if not self.is_sharded:
            is_server = bool(self.workers) and worker == 0
            return [] if is_server else [(theirs, took)]
        message = took / self.workers
        others = [other for other in range(self.workers) if other != worker]
        own = [(f"{mine} {worker}", message)] * len(others)
        return [*own, *((f"{theirs} {other}", message) for other in others)]


class ServedClock(SimulatedClock):
    def __init__(self, policy: Policy, seconds: Seconds, costs: Costs) -> None:
        super().__init__(policy, seconds)
        self._costs = costs
        self._ports = defaultdict[str, _SharedPort](partial(_SharedPort, costs.queued))
        self._processors: defaultdict[str, _Processor] = defaultdict(_Processor)
        self._busy: list[tuple[float, int, str, int]] = []
        """A heap of (end time, learner, name of the port or processor, its count of changes)."""
        self._stages: list[tuple[float, int, int]] = []
        """A heap of (when a stage ends, learner, stage): updates, and stages that take no time."""
        self._parts: dict[tuple[int, int], int] = {}
        """How many parts of a learner's stage are still under way."""
        self._updated_s = 0.0
        """When the server has made the updates that are due."""
        self._versions: dict[int, int] = {}
        self.pulls = self.pushes = 0

    def _begin(self, work: Work) -> None:
        has_version = self._versions.get(work.learner) == work.version
        self._versions[work.learner] = work.version
        self._enter(COMPUTE if has_version else PULL, work.learner, self.time_s)

    def _next_end(self) -> tuple[float, int]:
        while True:
            end_s, learner, stage = self._end_of_stage()
            if stage == TAKE:
                return end_s, learner
            self._enter(stage + 1, learner, end_s)

    def _end_of_stage(self) -> tuple[float, int, int]:
        """Remove the stage that ends next. Raises: IndexError if none is under way."""
        while self._busy:
            end_s, _, name, changes = self._busy[0]
            place = self._place(name)
            is_next = changes == place.changes
            if is_next and self._stages and self._stages[0][0] <= end_s:
                break
            heapq.heappop(self._busy)
            if is_next:
                key = place.end(end_s)
                self._push_end(name)
                self._parts[key] -= 1
                if not self._parts[key]:
                    return end_s, *key
        return heapq.heappop(self._stages)

    def _place(self, name: str) -> "_SharedPort | _Processor":
        is_processor = name.startswith(PROCESSOR)
        return self._processors[name] if is_processor else self._ports[name]

    def _push_end(self, name: str) -> None:
        place = self._place(name)
        if place.is_busy:
            heapq.heappush(self._busy, (place.next_s, place.whose, name, place.changes))

    def _enter(self, stage: int, learner: int, time_s: float) -> None:
        costs = self._costs
        worker = learner % costs.workers if costs.workers else learner
        parts = []
        if stage == COMPUTE:
            parts = [(f"{PROCESSOR} {worker}", self._taken(learner))]
        elif stage == TAKE:
            # Owners share an update: each applies its part of every worker's gradients. That costs
            # as much as if each owner applied the whole gradients of its own worker.
            keeper = f"{PROCESSOR} {worker if costs.is_sharded else 0}"
            self._processors[keeper].delay(costs.take)
            self._push_end(keeper)
            self._updated_s = time_s = max(time_s, self._updated_s) + costs.take / costs.owners
        else:
            parts = costs.sent(worker, stage)
            self.pulls += bool(parts) and stage == PULL
            self.pushes += bool(parts) and stage == PUSH
        if not parts:
            heapq.heappush(self._stages, (time_s, learner, stage))
        self._parts[learner, stage] = len(parts)
        for name, took in parts:
            self._place(name).add(time_s, took, (learner, stage))
        for name in dict(parts):
            self._push_end(name)


class _Processor:
    """A processor that computes one work after the other."""

    def __init__(self) -> None:
        self.changes = 0
        self._works: deque[tuple[float, tuple[int, int]]] = deque()
        self.next_s = 0.0
        """When the first work ends."""

    @property
    def is_busy(self) -> bool:
        return bool(self._works)

    @property
    def whose(self) -> int:
        return self._works[0][1][0]

    def add(self, time_s: float, took: float, key: tuple[int, int]) -> None:
        if not self._works:
            self.next_s = time_s + took
        self.changes += 1
        self._works.append((took, key))

    def end(self, time_s: float) -> tuple[int, int]:
        self.changes += 1
        _, key = self._works.popleft()
        if self._works:
            self.next_s = time_s + self._works[0][0]
        return key

    def delay(self, took: float) -> None:
        """Let the processor do other work first."""
        self.changes += 1
        self.next_s += took


class _SharedPort:
    """A port whose transfers under way have equal shares of its rate, behind a queue."""

    def __init__(self, queued: float) -> None:
        self._queued = queued
        self.changes = 0
        self._now_s = 0.0
        self._served_s = 0.0
        """Seconds of port time that a transfer present from the start would have received."""
        self._ends: list[tuple[float, tuple[int, int]]] = []
        """A heap of (value of `_served_s` at which a transfer ends, its learner and stage)."""
        self._waiting: deque[tuple[float, float, tuple[int, int]]] = deque()
        """(value of `_served_s` at which a transfer begins, its seconds, its learner and stage)."""

    @property
    def is_busy(self) -> bool:
        return bool(self._ends)

    @property
    def whose(self) -> int:
        return self._ends[0][1][0]

    @property
    def next_s(self) -> float:
        """When the next transfer ends if no other comes."""
        now_s, served_s = self._now_s, self._served_s
        count, first = len(self._ends), self._ends[0][0]
        for start, took, _ in self._waiting:
            if start >= first:
                break
            now_s += (start - served_s) * count
            served_s, count, first = start, count + 1, min(first, start + took)
        return now_s + max(0.0, first - served_s) * count

    def add(self, time_s: float, took: float, key: tuple[int, int]) -> None:
        self._advance(time_s)
        self._waiting.append((self._served_s + self._queued, took, key))
        self._begin_first()

    def end(self, time_s: float) -> tuple[int, int]:
        self._advance(time_s)
        _, key = heapq.heappop(self._ends)
        self._begin_first()
        return key

    def _begin_first(self) -> None:
        """Begin what waits in the queue of a port that is idle."""
        if self._waiting and not self._ends:
            self._begin()

    def _begin(self) -> None:
        _, took, key = self._waiting.popleft()
        heapq.heappush(self._ends, (self._served_s + took, key))

    def _advance(self, time_s: float) -> None:
        self.changes += 1
        while self._waiting:
            start = self._waiting[0][0]
            begins_s = self._now_s + (start - self._served_s) * len(self._ends)
            if begins_s > time_s:
                break
            self._now_s, self._served_s = begins_s, start
            self._begin()
        if self._ends:
            self._served_s += (time_s - self._now_s) / len(self._ends)
        self._now_s = time_s


@dataclass(frozen=True)
class PlannedKeeper:
    """The first of `size` workers keeps the weights."""

    size: int

    @property
    def part(self) -> float:
        """The share of a worker's transfers that go to or come from other workers."""
        return 1.0

    @property
    def messages(self) -> int:
        """The number of messages of a pull or a push."""
        return 1

    def said(self, codec: str) -> str:
        """The text after the mode's name. codec: the gradients' codec; empty without one."""
        return f", {codec}" if codec else ""

    def costs(self, pull_s: float, push_s: float, take_s: float, queued_s: float) -> Costs:
        """Costs for the clock. take_s: the server's for a gradient; queued_s: in a port's queue."""
        return Costs(pull_s, push_s, take_s, self.size)

    def beside_s(self, coded_s: float, update_s: float) -> float:
        """Seconds that a worker spends on its gradient. coded_s: to encode it."""
        return coded_s


@dataclass(frozen=True)
class InShardsPrice(PlannedKeeper):
    @property
    def part(self) -> float:
        return (self.size - 1) / self.size

    @property
    def messages(self) -> int:
        return self.size - 1

    def said(self, codec: str) -> str:
        return ", sharded" + super().said(codec)

    def costs(self, pull_s: float, push_s: float, take_s: float, queued_s: float) -> Costs:
        # A queue brings two owners into phase from any start. More come into one of several
        # patterns, and which one is not known; without a queue they are forecast in none of them.
        queued = queued_s if self.size == 2 else 0.0
        return replace(
            super().costs(pull_s, push_s, take_s, queued_s), is_sharded=True, queued=queued
        )


@dataclass(frozen=True)
class LocklessPrice(PlannedKeeper):
    """All workers write to weights in shared memory, so nothing travels."""

    @property
    def part(self) -> float:
        return 0.0

    def said(self, codec: str) -> str:
        return ", no lock"

    def costs(self, pull_s: float, push_s: float, take_s: float, queued_s: float) -> Costs:
        return Costs(workers=self.size)

    def beside_s(self, coded_s: float, update_s: float) -> float:
        return update_s


def planned_keeper(words: SynchronyConfig, size: int) -> PlannedKeeper:
    if words.is_lockless:
        return LocklessPrice(size)
    return InShardsPrice(size) if words.server == SHARDED and size > 1 else PlannedKeeper(size)
