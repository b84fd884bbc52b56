"""The real clock: events as they happen, from learners that compute at the same time.

One thread drives the policy: it hands out work, receives results, and decides. So the log has the
order of its decisions, and a replay needs nothing else. Each learner is a thread with one work at a
time. `begin` gives it work, and it reports in a queue that all learners share.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from torch import Tensor

from firecaffe.cluster.agree import POLL_S
from firecaffe.errors import PeerLostError
from firecaffe.synchrony.events import Event, Join, Lose, Pull, Push, expect_same
from firecaffe.synchrony.server_policies import Policy, Work
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.messages import WORK, Head, Messages
from firecaffe.training.modes.served.server_memory import Gradient, ServerMemory
from firecaffe.training.modes.served.work_gradient import Bench, Contribution


@dataclass(frozen=True)
class Arrival:
    learner: "ClockLearner"
    work: Work
    contribution: Contribution


@dataclass(frozen=True)
class LostLearner:
    learner: "ClockLearner"
    why: str


@dataclass(frozen=True)
class LostRank:
    rank: int
    why: str


@dataclass(frozen=True)
class Joined:
    learners: "list[ClockLearner]"


@dataclass(frozen=True)
class Failed:
    error: BaseException


Arrivals = SimpleQueue[Arrival | LostLearner | LostRank | Joined | Failed]


@dataclass(frozen=True)
class Begin:
    work: Work
    weights: Mapping[str, Tensor]
    is_dropped: bool
    """Whether the learner's previous contribution does not count."""


@dataclass(frozen=True)
class _End:
    text: str
    weights: Mapping[str, Tensor]


@dataclass
class LearnerCosts:
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    busy_s: float = 0.0


class ClockLearner(ABC):
    asks_to_stop = False
    is_dropped = False
    """Whether the last contribution does not count."""

    def __init__(self, number: int, rank: int, arrivals: Arrivals) -> None:
        self.number, self.rank = number, rank
        self.spent = LearnerCosts()
        self._arrivals = arrivals
        self._orders: SimpleQueue[Begin | _End] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"learner-{number}", daemon=True)
        self._thread.start()

    def begin(self, work: Work, weights: Mapping[str, Tensor]) -> None:
        """Give the learner work. `weights` are parameters and buffers that no longer change."""
        self._orders.put(Begin(work, weights, self.is_dropped))

    def end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        """End the learner once its work is done. `text` and `weights` are for its process."""
        self._orders.put(_End(text, weights))

    def cut(self) -> None:
        """End the learner from another thread, whatever it is doing."""
        self.end("", {})

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while isinstance(order := self._orders.get(), Begin):
                contribution = self._do(order)
                self.spent.busy_s += contribution.data_s + contribution.compute_s
                self._arrivals.put(Arrival(self, order.work, contribution))
            self._tell_end(order.text, order.weights)
        except PeerLostError as error:
            self._arrivals.put(LostLearner(self, str(error)))
        except BaseException as error:
            self._arrivals.put(Failed(error))

    @abstractmethod
    def _do(self, order: Begin) -> Contribution: ...

    @abstractmethod
    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None: ...


class OwnLearner(ClockLearner):
    def __init__(self, number: int, arrivals: Arrivals, bench: Bench, coder: Coder) -> None:
        self._bench, self._coder = bench, coder
        super().__init__(number, 0, arrivals)

    def _do(self, order: Begin) -> Contribution:
        if order.is_dropped:
            self._coder.drop(self.number)
        contribution = self._bench.compute(order.work, order.weights)
        self.spent.pulled_bytes, self.spent.pushed_bytes = contribution.moved
        gradient = contribution.gradient
        if contribution.is_finite is not None:  # the gradient went to its owners
            return contribution
        sent = Gradient(self._coder.as_received(self.number, gradient.tensors), gradient.tail)
        return replace(contribution, gradient=sent)

    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        self._bench.end()


class RemoteLearner(ClockLearner):
    def __init__(self, number: int, rank: int, arrivals: Arrivals, messages: Messages) -> None:
        self._messages = messages
        self._version = -1  # the one that the other end has
        super().__init__(number, rank, arrivals)

    def _do(self, order: Begin) -> Contribution:
        messages, work = self._messages, order.work
        is_new = work.version != self._version
        messages.send_head(Head(WORK, *work, is_new, is_dropped=order.is_dropped))
        if is_new:
            messages.send_weights(order.weights)
            self._version = work.version
        contribution, asks = messages.receive_contribution()
        self.asks_to_stop |= asks
        self.spent.pulled_bytes = messages.lane.sent_bytes + contribution.moved[0]
        self.spent.pushed_bytes = messages.lane.received_bytes + contribution.moved[1]
        return replace(contribution, rank=self.rank)

    def _tell_end(self, text: str, weights: Mapping[str, Tensor]) -> None:
        self._messages.send_end(text, weights)

    def cut(self) -> None:
        self._messages.lane.cut()
        super().cut()


OnRankLost = Callable[[int, str], object]


class RealClock:
    """Produces the events as they happen, with their gradients. Its state has the policy's.

    Works under way are lost with their processes. So a resumed training begins with the loss of all
    learners that were there.
    """

    def __init__(self, policy: Policy, memory: ServerMemory, needs_all: bool = False) -> None:
        self.policy, self._memory, self.needs_all = policy, memory, needs_all
        self.time_s = 0.0
        self.learners: dict[int, ClockLearner] = {}
        self.moved: Mapping[int, tuple[int, int]] = {}
        """Bytes (sent, received) of each rank as a server; empty if only rank 0 is."""
        self.arrivals: Arrivals = SimpleQueue()
        self.all_learners: list[ClockLearner] = []
        """All learners so far, including lost ones."""
        self._asking: list[int] = []  # learners without work, in the order in which they asked
        self._due: deque[ClockLearner | int] = deque()  # who joins; numbers of lost learners
        self._lost_ranks: dict[int, str] = {}
        self._came_s: dict[int, float] = {}
        self._left_s: dict[int, float] = {}
        self._is_resumed = False
        self._started_s = 0.0
        self._contribution: Contribution | None = None
        self._look: Callable[[], None] = lambda: None
        self._on_rank_lost: OnRankLost = lambda *_: None

    def start(
        self,
        learners: Sequence[ClockLearner],
        look: Callable[[], None] = lambda: None,
        on_rank_lost: OnRankLost = lambda *_: None,
    ) -> None:
        """Start the clock. A new training begins with the learners that the policy knows.

        `look` is called while waiting, and may raise. `on_rank_lost` is called for each lost rank.
        """
        self._look, self._on_rank_lost = look, on_rank_lost
        self._started_s = time.monotonic() - self.time_s
        if self._is_resumed:
            self._due.extend(sorted(self.policy.learners))
            self._due.extend(learners)
            return
        for learner in learners:
            self._welcome(learner)

    def next(self) -> Event:
        """Return the next event. Raises: an own learner's error, and what `look` raises."""
        while True:
            if self._due:
                return self._join_or_lose(self._due.popleft())
            for number in self._asking:
                work = self.policy.begin(number)
                if work is not None:
                    self._asking.remove(number)
                    self._memory.keep(work.version)
                    self.learners[number].begin(work, self._memory.versions[work.version])
                    return Pull(self._now(), work)
            if (event := self._arrived()) is not None:
                return event

    def follow(self, event: Event) -> None:
        policy = self.policy
        made: Event | None = event
        self.time_s = event.time_s
        match event:
            case Pull():
                work = policy.begin(event.work.learner)
                made = None if work is None else Pull(event.time_s, work)
            case Push():
                counts = policy.contribute(event.work)
                made = Push(event.time_s, event.work, counts, policy.commit())
            case Lose():
                policy.lose(event.learner)
            case Join():
                policy.join(event.learner)
        expect_same(made, event)

    def of(self, work: Work) -> Contribution:
        assert self._contribution is not None
        return self._contribution

    @property
    def row(self) -> dict[str, Any]:
        """Learners' costs, for result.json. A rank is idle if it neither fetches nor computes."""
        pulled, pushed, busy_s = Counter[str](), Counter[str](), defaultdict[str, float](float)
        for learner in self.all_learners:
            pulled[str(learner.number)] += learner.spent.pulled_bytes
            pushed[str(learner.number)] += learner.spent.pushed_bytes
            busy_s[str(learner.rank)] += learner.spent.busy_s
        moved = self.moved or {0: (pulled.total(), pushed.total())}
        return {
            "rank_by_learner": {str(learner.number): learner.rank for learner in self.all_learners},
            "pulled_bytes_by_learner": dict(pulled),
            "pushed_bytes_by_learner": dict(pushed),
            "server_bytes_by_rank": {str(rank): list(numbers) for rank, numbers in moved.items()},
            "idle_by_rank": {
                rank: 1 - busy / self._present_s(int(rank)) for rank, busy in busy_s.items()
            },
            "lost_ranks": {str(rank): why for rank, why in self._lost_ranks.items()},
        }

    def _present_s(self, rank: int) -> float:
        numbers = [learner.number for learner in self.all_learners if learner.rank == rank]
        left_s = max(self._left_s.get(number, self.time_s) for number in numbers)
        return max(left_s - min(self._came_s[number] for number in numbers), 1e-9)

    def drain_arrivals(self) -> BaseException | None:
        """Process losses and joins after the last event. Return this process's first error."""
        error: BaseException | None = None
        comers = [due for due in self._due if isinstance(due, ClockLearner)]
        while not self.arrivals.empty():
            arrived = self.arrivals.get()
            if isinstance(arrived, Failed):
                error = error or arrived.error
            self._handle_lost(arrived)
            comers += arrived.learners if isinstance(arrived, Joined) else []
        self._due.clear()
        for comer in comers:
            self._welcome(comer)
        return error

    def _arrived(self) -> Event | None:
        try:
            arrived = self.arrivals.get(timeout=POLL_S)
        except Empty:
            self._look()
            return None
        match arrived:
            case Failed():
                raise arrived.error
            case Joined():
                self._due.extend(arrived.learners)
            case Arrival() if self.learners.get(arrived.work.learner) is arrived.learner:
                counts = self.policy.contribute(arrived.work)
                arrived.learner.is_dropped = not counts
                self._asking.append(arrived.work.learner)
                self._contribution = arrived.contribution
                return Push(self._now(), arrived.work, counts, self.policy.commit())
        self._handle_lost(arrived)
        return None

    def _handle_lost(self, arrived: object) -> None:
        match arrived:
            case LostLearner() if self.needs_all:
                raise PeerLostError(arrived.why)
            case LostLearner():
                self._lose(arrived.learner, arrived.why)
            case LostRank():
                for learner in [*self.learners.values()]:
                    if learner.rank == arrived.rank:
                        self._lose(learner, arrived.why)

    def _lose(self, learner: ClockLearner, why: str) -> None:
        if self.learners.get(learner.number) is not learner:
            return
        del self.learners[learner.number]
        self._left_s[learner.number] = self.time_s
        learner.cut()
        self._due.append(learner.number)
        if learner.rank not in self._lost_ranks:
            self._lost_ranks[learner.rank] = why
            self._on_rank_lost(learner.rank, why)

    def _join_or_lose(self, who: ClockLearner | int) -> Event:
        if isinstance(who, int):
            self.policy.lose(who)
            if who in self._asking:
                self._asking.remove(who)
            return Lose(self._now(), who)
        self.policy.join(who.number)
        self._welcome(who)
        return Join(self._now(), who.number)

    def _welcome(self, learner: ClockLearner) -> None:
        self.learners[learner.number] = learner
        self._came_s[learner.number] = self.time_s
        self.all_learners.append(learner)
        self._asking.append(learner.number)

    def _now(self) -> float:
        self.time_s = time.monotonic() - self._started_s
        return self.time_s

    def state_dict(self) -> dict[str, Any]:
        return {"time_s": self.time_s, "policy": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.time_s = state["time_s"]
        self.policy.load_state_dict(state["policy"])
        self._is_resumed = True
