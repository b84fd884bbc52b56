"""Backup workers: a step does not wait for its last b leaves.

When all leaves of a step but b are there the update is made, over these. What is still computed
then is late: it is dropped by its step number whenever it comes. All gradients of an update are of
its own version.

As soon as the leaves that are there and those under way are enough, a further one is spare. It
would keep its learner from the next step. So it goes to one that has none of this step yet, or to
one that another is behind: whose leaf was handed out before the last one that it has brought.

Source: Chen et al. 2016, "Revisiting distributed synchronous SGD".
"""

from typing import Any

from firecaffe.synchrony.leaves import Leaf, LeafQueue
from firecaffe.synchrony.policy import Desk, Update, Work, row_of, work_of


class Backup(Desk):
    """One update a step. See `policy.Policy`."""

    def __init__(
        self, queue: LeafQueue, learners: int, version: int = 0, backup_workers: int = 0
    ) -> None:
        super().__init__(queue, learners, version)
        self._step = queue.leaves.first_step
        self._backups = backup_workers
        self._arrived: list[Work] = []
        self._turns: dict[int, int] = {}
        """By learner, which leaf of the step it had last, as they were handed out."""

    def begin(self, learner: int) -> Work | None:
        first = self.queue.first
        if first is None or first.step > self._step:
            return None
        if not self._may_be_needed(learner):
            return None
        self._turns[learner] = 1 + max(self._turns.values(), default=0)
        return self.hand_out(learner)

    def _may_be_needed(self, learner: int) -> bool:
        """Whether a further leaf of the step is none too many, or this learner may have it."""
        under_way = [each for each, work in self.in_flight.items() if work.leaf.step == self._step]
        if len(self._arrived) + len(under_way) < self._enough or learner not in self._turns:
            return True
        return any(self._turns[each] < self._turns[learner] for each in under_way)

    @property
    def _enough(self) -> int:
        """The number of leaves of the step that make its update."""
        return max(1, self.queue.leaves.of_step(self._step) - self._backups)

    def contribute(self, work: Work) -> bool:
        if not self.take_back(work) or work.leaf.step != self._step:
            return False
        self._arrived.append(work)
        return True

    def commit(self) -> Update | None:
        if len(self._arrived) < self._enough:
            return None
        works = tuple(sorted(self._arrived, key=lambda work: work.leaf))
        counted = {work.leaf.place for work in works}
        leaves = range(self.queue.leaves.of_step(self._step))
        late = [Leaf(self._step, place) for place in leaves if place not in counted]
        while (first := self.queue.first) is not None and first.step == self._step:
            self.queue.take()
        self._arrived, self._turns = [], {}
        self._step += 1
        self.version += 1
        return Update(self.version, works, tuple(late))

    def lose(self, learner: int) -> None:
        work = self.take_off(learner)
        if work is not None and work.leaf.step == self._step:
            self.queue.put_back(work.leaf)

    def state_dict(self) -> dict[str, Any]:
        arrived = [row_of(work) for work in self._arrived]
        turns = [list(each) for each in self._turns.items()]
        desk = super().state_dict()
        return {"desk": desk, "step": self._step, "arrived": arrived, "turns": turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["desk"])
        self._step = state["step"]
        self._arrived = [work_of(row) for row in state["arrived"]]
        self._turns = dict(map(tuple, state["turns"]))
