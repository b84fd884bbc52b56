"""Bounded staleness: asynchronous updates, but nobody gets more than s steps ahead.

The clock is that of the leaves: a leaf of step c waits until all leaves of steps before c - s have
been applied. So whoever computes at clock c sees all updates of clocks up to c - s - 1, which is
what the source promises. There each worker has leaves of its own, and its clock counts them: one at
half speed then holds all others at its pace. Here leaves come from one queue, and a slow learner
takes fewer. With s = 0 a step begins once the one before is applied.

Source: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
server".
"""

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

    def begin(self, learner: int) -> Work | None:
        first = self.queue.first
        if first is None:
            return None
        # Leaves are handed out in order, so what is missing is under way.
        oldest = min((work.leaf.step for work in self.in_flight.values()), default=first.step)
        return None if first.step - oldest > self._most else super().begin(learner)
