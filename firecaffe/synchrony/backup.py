"""Backup workers: a step does not wait for its last b leaves.

Each learner holds at most one leaf, so the last b leaves of a step are those of the b slowest
learners. When the others are there the update is made, over these, and the late gradients are
dropped by their step number whenever they come. All gradients of an update are of its own version.

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

    def begin(self, learner: int) -> Work | None:
        first = self.queue.first
        if first is None or first.step > self._step:
            return None
        return self.hand_out(learner)

    def contribute(self, work: Work) -> bool:
        if not self.take_back(work) or work.leaf.step != self._step:
            return False
        self._arrived.append(work)
        return True

    def commit(self) -> Update | None:
        leaves = self.queue.leaves.of_step(self._step)
        # All leaves are handed out before any is given up: whoever asks may be fast.
        first = self.queue.first
        has_more = first is not None and first.step == self._step
        if has_more or len(self._arrived) < max(1, leaves - self._backups):
            return None
        works = tuple(sorted(self._arrived, key=lambda work: work.leaf))
        counted = {work.leaf.place for work in works}
        late = [Leaf(self._step, place) for place in range(leaves) if place not in counted]
        self._arrived = []
        self._step += 1
        self.version += 1
        return Update(self.version, works, tuple(late))

    def lose(self, learner: int) -> None:
        work = self.take_off(learner)
        if work is not None and work.leaf.step == self._step:
            self.queue.put_back(work.leaf)

    def state_dict(self) -> dict[str, Any]:
        arrived = [row_of(work) for work in self._arrived]
        return {"desk": super().state_dict(), "step": self._step, "arrived": arrived}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["desk"])
        self._step = state["step"]
        self._arrived = [work_of(row) for row in state["arrived"]]
