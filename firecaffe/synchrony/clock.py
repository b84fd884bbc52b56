"""The simulated clock: learners that take as long as `speeds` says, in one process.

A work goes through stages, one after the other: its weights are pulled, it is computed, its
gradient is pushed, the server takes it. Each stage has something that serves one work at a time,
who comes first first: the server's port out, the worker's processor, the server's port in, the
server. Whoever has to wait for the policy asks again after each event, those that wait longest
first. Equal recipes have equal events.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.policy import Policy, Work, row_of, work_of
from firecaffe.synchrony.speeds import Seconds

COMPUTE, LAST_STAGE = 1, 3
"""Of the stages 0 (pull), 1 (compute), 2 (push) and 3 (the server takes it)."""


@dataclass(frozen=True)
class Costs:
    """What a work costs beside computing, in the unit of the speeds, and who computes."""

    pull: float = 0.0
    """Time of a pull over the server's port."""
    push: float = 0.0
    """Time of a push over it."""
    take: float = 0.0
    """The server's time for a gradient."""
    workers: int = 0
    """Learner n is of worker n mod this, which computes one work at a time; worker 0 has the server
    in it, and sends nothing. 0: each learner is a worker by itself."""
    is_sharded: bool = False
    """Whether each worker serves an equal part of the weights. Then a pull and a push go by parts
    to and from all others at once, through the ports of both."""


class SimulatedClock:
    """Brings events about. The state is JSON; the policy's goes with it."""

    def __init__(self, policy: Policy, seconds: Seconds, costs: Costs | None = None) -> None:
        """costs: of a work beside computing; None: it has none."""
        self.policy, self._seconds, self._costs = policy, seconds, costs or Costs()
        self.time_s = 0.0
        self._asking = sorted(policy.learners)
        self._counts = dict.fromkeys(self._asking, 0)
        self._ends: list[tuple[float, int, int]] = []
        """A heap of (when a stage ends, learner, stage)."""
        self._free_at: dict[str, float] = {}
        """When what serves one work at a time is free again."""
        self._works: dict[int, Work] = {}

    def next(self) -> Event:
        """The next event. Raises: IndexError if all leaves are done."""
        for learner in self._asking:
            work = self.policy.begin(learner)
            if work is not None:
                self._asking.remove(learner)
                self._works[learner] = work
                self._enter(0, learner, self.time_s)
                return Pull(self.time_s, work)
        while True:
            end_s, learner, stage = heapq.heappop(self._ends)
            if stage == LAST_STAGE:
                break
            self._enter(stage + 1, learner, end_s)
        self.time_s = end_s
        work = self._works.pop(learner)
        counts = self.policy.contribute(work)
        self._asking.append(learner)
        return Push(self.time_s, work, counts, self.policy.commit())

    def _enter(self, stage: int, learner: int, time_s: float) -> None:
        """A learner's work comes to a stage."""
        costs = self._costs
        worker = learner % costs.workers if costs.workers else learner
        if stage == COMPUTE:
            took = self._seconds(learner, self._counts[learner])
            self._counts[learner] += 1
            uses = {f"worker {worker}": took}
        elif stage == LAST_STAGE:
            uses = {"server": costs.take / (costs.workers if costs.is_sharded else 1)}
        else:
            uses = self._ports(worker, stage)
        heapq.heappush(self._ends, (self._use(uses, time_s), learner, stage))

    def _ports(self, worker: int, stage: int) -> dict[str, float]:
        """The ports that a worker's pull or push goes through, and for how long."""
        costs = self._costs
        took, theirs, mine = costs.pull, "out", "in"
        if stage != 0:
            took, theirs, mine = costs.push, "in", "out"
        if not costs.is_sharded:
            is_server = bool(costs.workers) and worker == 0
            return {} if is_server else {f"port {theirs}": took}
        part = took / costs.workers
        others = [each for each in range(costs.workers) if each != worker]
        return {f"port {theirs} {each}": part for each in others} | {
            f"port {mine} {worker}": part * len(others)
        }

    def _use(self, uses: Mapping[str, float], time_s: float) -> float:
        """Uses what serves one work at a time, each for a while. Returns when all have done so."""
        ends = [time_s]
        for name, took in uses.items():
            if took:
                self._free_at[name] = max(time_s, self._free_at.get(name, 0.0)) + took
                ends.append(self._free_at[name])
        return max(ends)

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "asking": list(self._asking),
            "counts": [list(each) for each in self._counts.items()],
            "ends": [list(each) for each in sorted(self._ends)],
            "free_at": dict(self._free_at),
            "works": [row_of(work) for work in self._works.values()],
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_s = state["time_s"]
        self._asking = list(state["asking"])
        self._counts = dict(map(tuple, state["counts"]))
        self._ends = [tuple(each) for each in state["ends"]]  # sorted, which is a heap
        self._free_at = dict(state["free_at"])
        self._works = {row[0]: work_of(row) for row in state["works"]}
        self.policy.load_state_dict(state["policy"])
