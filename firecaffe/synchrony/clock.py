"""The simulated clock: learners that take as long as `speeds` says, in one process.

A heap holds when each learner will be done. Pulling and pushing take no time. Whoever has to wait
asks again after each event, those that wait longest first. Equal recipes have equal events.
"""

import heapq
from typing import Any

from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.policy import Policy, Work, row_of, work_of
from firecaffe.synchrony.speeds import Seconds


class SimulatedClock:
    """Brings events about. The state is JSON; the policy's goes with it."""

    def __init__(self, policy: Policy, seconds: Seconds) -> None:
        self.policy, self._seconds = policy, seconds
        self.time_s = 0.0
        self._asking = sorted(policy.learners)
        self._counts = dict.fromkeys(self._asking, 0)
        self._done_at: list[tuple[float, int]] = []
        self._works: dict[int, Work] = {}

    def next(self) -> Event:
        """The next event. Raises: IndexError if all leaves are done."""
        for learner in self._asking:
            work = self.policy.begin(learner)
            if work is not None:
                self._asking.remove(learner)
                took = self._seconds(learner, self._counts[learner])
                self._counts[learner] += 1
                self._works[learner] = work
                heapq.heappush(self._done_at, (self.time_s + took, learner))
                return Pull(self.time_s, work)
        self.time_s, learner = heapq.heappop(self._done_at)
        work = self._works.pop(learner)
        counts = self.policy.contribute(work)
        self._asking.append(learner)
        return Push(self.time_s, work, counts, self.policy.commit())

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_s": self.time_s,
            "asking": list(self._asking),
            "counts": [list(each) for each in self._counts.items()],
            "done_at": [list(each) for each in sorted(self._done_at)],
            "works": [row_of(work) for work in self._works.values()],
            "policy": self.policy.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.time_s = state["time_s"]
        self._asking = list(state["asking"])
        self._counts = dict(map(tuple, state["counts"]))
        self._done_at = [tuple(each) for each in state["done_at"]]  # sorted, which is a heap
        self._works = {row[0]: work_of(row) for row in state["works"]}
        self.policy.load_state_dict(state["policy"])
