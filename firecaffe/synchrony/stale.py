"""Bounded staleness: asynchronous updates, but nobody gets more than s leaves ahead.

A learner's clock is the number of gradients that it has brought. It waits while its clock is more
than s ahead of the slowest one's. With s = 0 all learners compute at the same version, and their
gradients are applied before the next ones begin.

Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
server".
"""

from typing import Any

from firecaffe.synchrony.asynchronous import Asynchronous
from firecaffe.synchrony.leaves import LeafQueue
from firecaffe.synchrony.policy import Work


class Stale(Asynchronous):
    """Each gradient is an update. See `policy.Policy`."""

    def __init__(
        self, queue: LeafQueue, learners: int, version: int = 0, max_staleness: int = 0
    ) -> None:
        super().__init__(queue, learners, version)
        self._most = max_staleness
        self.clocks = dict.fromkeys(range(learners), 0)

    def begin(self, learner: int) -> Work | None:
        if self.clocks[learner] - min(self.clocks.values()) > self._most:
            return None
        return super().begin(learner)

    def contribute(self, work: Work) -> bool:
        counts = super().contribute(work)
        if counts:
            self.clocks[work.learner] += 1
        return counts

    def lose(self, learner: int) -> None:
        super().lose(learner)
        self.clocks.pop(learner, None)

    def join(self, learner: int) -> None:
        """It begins where the slowest is, so that nobody has to wait for it."""
        super().join(learner)
        self.clocks.setdefault(learner, min(self.clocks.values(), default=0))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clocks": [list(each) for each in self.clocks.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.clocks = dict(map(tuple, state["clocks"]))
