"""The real clock: events as they happen, of learners that compute at the same time.

One thread drives the policy: it hands out work, takes what arrives, and decides. So the order of
its decisions is that of the log, and a replay needs nothing else.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from firecaffe.cluster.agree import LOOK_S
from firecaffe.synchrony.events import Event, Join, Lose, Pull, Push
from firecaffe.synchrony.policy import Policy, Work
from firecaffe.training.served.compute import Contribution
from firecaffe.training.served.learners import Arrival, Arrivals, Failed, Gone, Learner, LostRank
from firecaffe.training.served.memory import ServerMemory


class RealClock:
    """Brings events about, and the gradients with them. The state is JSON: the policy's. Works that
    are under way are lost with their processes, so whoever goes on from a state begins with the
    loss of all learners that were there.
    """

    def __init__(self, policy: Policy, memory: ServerMemory) -> None:
        self.policy, self._memory = policy, memory
        self.time_s = 0.0
        self.learners: dict[int, Learner] = {}
        self.arrivals: Arrivals = SimpleQueue()
        self._all: list[Learner] = []
        """Also those that are lost."""
        self._asking: list[int] = []
        """Those without work, who asked first comes first."""
        self._due: deque[Learner | int] = deque()
        """Who comes, and the numbers of those who are lost."""
        self._is_resumed = False
        self._started_s = self._resumed_s = 0.0
        self._brought: Contribution | None = None
        self._look: Callable[[], None] = lambda: None
        self._say: Callable[[str], None] = lambda _: None

    def start(
        self,
        learners: Sequence[Learner],
        look: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Starts the clock. learners: those that are there; at the beginning of a training those
        that the policy knows. look: called while it waits; it may raise. say: tells a person.
        """
        self._look, self._say = look, say
        self._resumed_s = self.time_s
        self._started_s = time.monotonic() - self.time_s
        if self._is_resumed:
            self._due.extend(sorted(self.policy.learners))
            self._due.extend(learners)
            return
        for each in learners:
            self._welcome(each)

    def next(self) -> Event:
        """The next event. Raises: what an own learner has met, and what `look` raises."""
        while True:
            if self._due:
                return self._come_or_go(self._due.popleft())
            for number in self._asking:
                work = self.policy.begin(number)
                if work is not None:
                    self._asking.remove(number)
                    self._memory.keep(work.version)
                    self.learners[number].begin(work, self._memory.versions[work.version])
                    return Pull(self._now(), work)
            if (event := self._arrived()) is not None:
                return event

    def of(self, work: Work) -> Contribution:
        """What the last push has brought; see `Contributions`."""
        assert self._brought is not None
        return self._brought

    @property
    def row(self) -> dict[str, Any]:
        """What learners have cost since the start, as result.json has it. A rank is idle if it
        neither fetches samples nor computes.
        """
        pulled, pushed, busy_s = Counter[str](), Counter[str](), defaultdict[str, float](float)
        for each in self._all:
            pulled[str(each.number)] += each.spent.pulled_bytes
            pushed[str(each.number)] += each.spent.pushed_bytes
            busy_s[str(each.rank)] += each.spent.busy_s
        passed_s = max(self.time_s - self._resumed_s, 1e-9)
        return {
            "pulled_bytes_by_learner": dict(pulled),
            "pushed_bytes_by_learner": dict(pushed),
            "idle_by_rank": {rank: 1 - busy / passed_s for rank, busy in busy_s.items()},
        }

    def _arrived(self) -> Event | None:
        try:
            arrived = self.arrivals.get(timeout=LOOK_S)
        except Empty:
            self._look()
            return None
        match arrived:
            case Failed():
                raise arrived.error
            case Gone():
                self._lose(arrived.learner, arrived.why)
            case LostRank():
                for learner in [*self.learners.values()]:
                    if learner.rank == arrived.rank:
                        self._lose(learner, arrived.why)
            case Arrival() if self.learners.get(arrived.work.learner) is arrived.learner:
                counts = self.policy.contribute(arrived.work)
                self._asking.append(arrived.work.learner)
                self._brought = arrived.brought
                return Push(self._now(), arrived.work, counts, self.policy.commit())
        return None

    def _lose(self, learner: Learner, why: str) -> None:
        if self.learners.get(learner.number) is not learner:
            return
        del self.learners[learner.number]
        learner.cut()
        self._due.append(learner.number)
        self._say(f"rank {learner.rank} is lost, and its micro-batches go to others: {why}")

    def _come_or_go(self, who: Learner | int) -> Event:
        if isinstance(who, int):
            self.policy.lose(who)
            if who in self._asking:
                self._asking.remove(who)
            return Lose(self._now(), who)
        self.policy.join(who.number)
        self._welcome(who)
        return Join(self._now(), who.number)

    def _welcome(self, learner: Learner) -> None:
        self.learners[learner.number] = learner
        self._all.append(learner)
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
