"""Asynchronous updates: each gradient as it arrives, or the mean of each c of them.

With one gradient an update this is Downpour's server; with c = ⌊N / n⌋ of N learners it is
n-softsync, whose mean staleness is about n.

Source: Dean et al. 2012, "Large scale distributed deep networks"; Zhang et al. 2016,
"Staleness-aware async-SGD for distributed deep learning".
"""

from typing import Any

from firecaffe.synchrony.leaves import LeafQueue
from firecaffe.synchrony.policy import Desk, Update, Work, row_of, work_of


class Asynchronous(Desk):
    """Nobody waits, but for the last leaves of the training. See `policy.Policy`."""

    def __init__(
        self, queue: LeafQueue, learners: int, version: int = 0, gradients_per_update: int = 1
    ) -> None:
        super().__init__(queue, learners, version)
        self._per_update = gradients_per_update
        self._pending: list[Work] = []

    def begin(self, learner: int) -> Work | None:
        return None if self.queue.first is None else self.hand_out(learner)

    def contribute(self, work: Work) -> bool:
        if not self.take_back(work):
            return False
        self._pending.append(work)
        return True

    def commit(self) -> Update | None:
        is_end = self.queue.first is None and not self.in_flight
        if len(self._pending) < (1 if is_end else self._per_update):
            return None
        works = tuple(sorted(self._pending, key=lambda work: work.leaf))
        self._pending = []
        self.version += 1
        return Update(self.version, works)

    def lose(self, learner: int) -> None:
        work = self.take_off(learner)
        if work is not None:
            self.queue.put_back(work.leaf)

    def state_dict(self) -> dict[str, Any]:
        return {"desk": super().state_dict(), "pending": [row_of(w) for w in self._pending]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["desk"])
        self._pending = [work_of(row) for row in state["pending"]]
