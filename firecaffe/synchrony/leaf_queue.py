"""The leaves of a training, in one queue from which learners take them.

A leaf is a micro-batch: (step, place in the step). This alone determines its samples and their
augmentation (`data.order`), whoever computes it. Each leaf is handed out until a learner has
computed it, so each sample of an epoch is used once, even if learners are slow or lost.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Leaf(NamedTuple):
    step: int
    place: int


@dataclass(frozen=True)
class Leaves:
    """The leaves with samples of the steps `first_step` to `last_step` - 1, in order."""

    first_step: int
    last_step: int
    steps_per_epoch: int
    per_step: int
    per_epoch: int
    """Leaves of an epoch, whose last step may have fewer than the others."""

    def of_step(self, step: int) -> int:
        within = step % self.steps_per_epoch
        return min(self.per_step, self.per_epoch - within * self.per_step)

    def __contains__(self, leaf: object) -> bool:
        if not isinstance(leaf, Leaf) or not self.first_step <= leaf.step < self.last_step:
            return False
        return 0 <= leaf.place < self.of_step(leaf.step)

    def before(self, step: int) -> int:
        """Return the number of leaves from `first_step` up to the given step."""
        return self._from_0(step) - self._from_0(self.first_step)

    def _from_0(self, step: int) -> int:
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.per_epoch + within * self.per_step


class LeafQueue:
    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self._next = Leaf(leaves.first_step, 0)
        self._returned: list[Leaf] = []

    @property
    def first(self) -> Leaf | None:
        """The leaf that is next; None if all are handed out."""
        if self._returned:
            return self._returned[0]
        return self._next if self._next.step < self.leaves.last_step else None

    @property
    def left(self) -> int:
        fresh = self.leaves.before(self.leaves.last_step) - self.leaves.before(self._next.step)
        return len(self._returned) + fresh - self._next.place

    def take(self) -> Leaf:
        if self._returned:
            return self._returned.pop(0)
        leaf = self._next
        if leaf.step >= self.leaves.last_step:
            raise IndexError("all leaves are handed out")
        is_last = leaf.place + 1 == self.leaves.of_step(leaf.step)
        self._next = Leaf(leaf.step + 1, 0) if is_last else Leaf(leaf.step, leaf.place + 1)
        return leaf

    def put_back(self, leaf: Leaf) -> None:
        """Return a leaf that no learner will deliver. It is handed out before all later ones."""
        self._returned = sorted([*self._returned, leaf])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "returned": list(self._returned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = Leaf(*state["next"])
        self._returned = [Leaf(*leaf) for leaf in state["returned"]]
