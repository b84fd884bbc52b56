"""The policies of the modes with a server: who computes which leaf of the queue, at which version.

A leaf is a micro-batch: (step, place in the step). This alone determines its samples and their
augmentation (`data.order`), whichever learner computes it. A leaf is handed out until a learner has
computed it, so each sample of an epoch is used once, even if learners are slow or lost.

A policy knows events, but no time, thread or tensor. So it serves both clocks:

    begin        a learner asks for work: a leaf at the present version, or it has to wait
    contribute   a gradient arrived: it counts, or it is dropped
    commit       whether an update is due, and of which gradients
    lose, join   a learner is lost, and others get its leaf; a learner joins

A *version* is the number of updates that a copy of the weights has received. A gradient's
*staleness* is the version that it is applied to minus the version that it was computed at.

docs/explanation/synchrony.md has the titles of the sources.

`Asynchronous` applies each gradient as it arrives (Downpour: Dean et al. 2012), or the mean of c.
With c = ⌊N / n⌋ of N learners, it is n-softsync: mean staleness about n (Zhang et al. 2016).

`Backup` (Chen et al. 2016) makes a step's update when all but b of its leaves have arrived. Later
gradients have an old version and are dropped, so all gradients of an update have its version.
`Backup` forgets late leaves. `BackupAgain` hands them out before all others, so each leaf counts,
and there are more updates; each but the last has a step's gradients less b. Once arrived leaves and
those under way suffice, a further one would keep its learner from the next step. It goes only to a
learner without a leaf of this step, or one that is a whole turn (as many leaves as learners) ahead
of another. (A learner that is behind by less is about to finish.)

`Stale` (Ho et al. 2013) lets no learner get more than s steps ahead: a leaf of step c waits until
all leaves of steps before c - s are applied, so its weights have all updates of steps up to
c - s - 1. In the source, each worker has its own leaves and clock, so one at half speed slows all.
Here leaves come from one queue, and a slow learner takes fewer. With s = 0, a step begins once the
previous one is applied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct

from firecaffe.schema import Count
from firecaffe.synchrony.config import ASYNCHRONOUS, BACKUP, STALE, SynchronyConfig


class Leaf(NamedTuple):
    step: Count
    place: Count


@dataclass(frozen=True)
class Leaves:
    """The leaves that have samples, of the steps `first_step` to `last_step` - 1, in order."""

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


class Work(NamedTuple):
    learner: Count
    step: Count
    place: Count
    version: Count

    @property
    def leaf(self) -> Leaf:
        return Leaf(self.step, self.place)


class Update(Struct, frozen=True, omit_defaults=True):
    """An update by the mean of gradients: a tree sum in leaf order, with zeros for dropped ones."""

    version: Count
    works: tuple[Work, ...]
    dropped: tuple[Leaf, ...]
    """Leaves that are no longer waited for. Their samples are lost."""
    again: tuple[Leaf, ...] = ()
    """Leaves that are no longer waited for, but are handed out again."""

    def staleness(self, work: Work) -> int:
        return self.version - 1 - work.version


class Policy:
    """A policy: who has to wait, and which gradients count. All its state is JSON.

    Here, learners wait only once all leaves are handed out. Others extend it.
    """

    arrived_key = "pending"
    """The key of `arrived` in a checkpoint."""

    def __init__(
        self, queue: LeafQueue, learners: int, version: int, config: SynchronyConfig
    ) -> None:
        self.queue, self.version, self.config = queue, version, config
        self.learners = set(range(learners))
        self.in_flight: dict[int, Work] = {}
        self.arrived: list[Work] = []
        """The works whose gradients wait for their update."""

    def begin(self, learner: int) -> Work | None:
        """Return the next work of a learner that has none, or None if it has to wait."""
        return None if self.queue.first is None else self._hand_out(learner)

    def contribute(self, work: Work) -> bool:
        """Receive a gradient. Return False if it is dropped, as a lost learner's is."""
        if self.in_flight.get(work.learner) != work:
            return False
        del self.in_flight[work.learner]
        if self._is_late(work):
            return False
        self.arrived.append(work)
        return True

    def commit(self) -> Update | None:
        """Return the update that is due, which makes a new version, or None."""
        if len(self.arrived) < self._num_needed:
            return None
        update = self._update(tuple(sorted(self.arrived, key=lambda work: work.leaf)))
        self.arrived, self.version = [], update.version
        return update

    def lose(self, learner: int) -> None:
        self.learners.discard(learner)
        work = self.in_flight.pop(learner, None)
        if work is not None and not self._is_late(work):
            self.queue.put_back(work.leaf)

    def join(self, learner: int) -> None:
        self.learners.add(learner)

    @property
    def _num_needed(self) -> int:
        """The number of gradients with which an update is due."""
        return 1

    def _is_late(self, work: Work) -> bool:
        """Whether the update that a work was for is already made."""
        return False

    def _update(self, works: tuple[Work, ...]) -> Update:
        return Update(self.version + 1, works, dropped=())

    def _hand_out(self, learner: int) -> Work:
        """Give a learner the next leaf. Raises: ValueError if it has a leaf or is not there."""
        if learner in self.in_flight or learner not in self.learners:
            raise ValueError(f"learner {learner} asks for work, and has some or is not there")
        work = Work(learner, *self.queue.take(), self.version)
        self.in_flight[learner] = work
        return work

    def state_dict(self) -> dict[str, Any]:
        desk = {
            "version": self.version,
            "queue": self.queue.state_dict(),
            "learners": sorted(self.learners),
            "in_flight": [list(work) for work in self.in_flight.values()],
        }
        return {"desk": desk, self.arrived_key: [list(work) for work in self.arrived]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        desk = state["desk"]
        self.version = desk["version"]
        self.queue.load_state_dict(desk["queue"])
        self.learners = set(desk["learners"])
        self.in_flight = {row[0]: Work(*row) for row in desk["in_flight"]}
        self.arrived = [Work(*row) for row in state[self.arrived_key]]


class Asynchronous(Policy):
    """A policy with an update by several gradients, or by those that are left at the end."""

    @property
    def _num_needed(self) -> int:
        is_end = self.queue.first is None and not self.in_flight
        return 1 if is_end else self.config.gradients_per_update


class Backup(Policy):
    """A policy with one update per step, which forgets late leaves."""

    arrived_key = "arrived"

    def __init__(
        self, queue: LeafQueue, learners: int, version: int, config: SynchronyConfig
    ) -> None:
        super().__init__(queue, learners, version, config)
        self._turns: dict[int, int] = {}
        """The turn in which each learner got its last leaf of this update."""

    def begin(self, learner: int) -> Work | None:
        if not self._has_leaf or not self._may_be_needed(learner):
            return None
        self._turns[learner] = 1 + max(self._turns.values(), default=0)
        return self._hand_out(learner)

    def commit(self) -> Update | None:
        update = super().commit()
        if update is not None:
            self._turns = {}
        return update

    def _may_be_needed(self, learner: int) -> bool:
        if self._taken < self._num_needed or learner not in self._turns:
            return True
        turns = (self._turns[work.learner] for work in self._under_way)
        return any(turn + len(self.learners) <= self._turns[learner] for turn in turns)

    @property
    def _under_way(self) -> list[Work]:
        return [work for work in self.in_flight.values() if not self._is_late(work)]

    @property
    def _taken(self) -> int:
        return len(self.arrived) + len(self._under_way)

    @property
    def _has_leaf(self) -> bool:
        # Whether the update may still use a leaf. The version is the number of its step.
        return self.queue.first is not None and self.queue.first.step == self.version

    @property
    def _num_needed(self) -> int:
        return max(1, self.queue.leaves.of_step(self.version) - self.config.backup_workers)

    def _is_late(self, work: Work) -> bool:
        return work.version != self.version

    def _update(self, works: tuple[Work, ...]) -> Update:
        while self._has_leaf:
            self.queue.take()
        counted = {work.place for work in works}
        places = range(self.queue.leaves.of_step(self.version))
        late = tuple(Leaf(self.version, place) for place in places if place not in counted)
        return Update(self.version + 1, works, dropped=late)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "turns": [list(item) for item in self._turns.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._turns = dict(map(tuple, state["turns"]))


class BackupAgain(Backup):
    """A `Backup` that hands late leaves out again."""

    @property
    def _has_leaf(self) -> bool:
        return self.queue.first is not None and self._taken < self.queue.leaves.per_step

    @property
    def _num_needed(self) -> int:
        left = self._taken + self.queue.left
        return max(1, min(self.queue.leaves.per_step - self.config.backup_workers, left))

    def _update(self, works: tuple[Work, ...]) -> Update:
        late = tuple(sorted(work.leaf for work in self._under_way))
        for leaf in late:
            self.queue.put_back(leaf)
        return Update(self.version + 1, works, dropped=(), again=late)


class Stale(Policy):
    """A policy with an update per gradient and bounded staleness."""

    def begin(self, learner: int) -> Work | None:
        first = self.queue.first
        if first is None:
            return None
        # Leaves are handed out in order, so all missing leaves are under way.
        oldest = min((work.step for work in self.in_flight.values()), default=first.step)
        is_ahead = first.step - oldest > self.config.max_staleness
        return None if is_ahead else self._hand_out(learner)


SYNCHRONY: dict[str, Callable[[SynchronyConfig], type[Policy]]] = {
    BACKUP: lambda config: BackupAgain if config.dropped == "again" else Backup,
    STALE: lambda _: Stale,
    ASYNCHRONOUS: lambda _: Asynchronous,
}
"""The policies by `synchrony.mode`. Versions count all updates, including those of warm steps."""


def make_policy(config: SynchronyConfig, leaves: Leaves, learners: int) -> Policy:
    made = SYNCHRONY[config.mode](config)
    return made(LeafQueue(leaves), learners, leaves.first_step, config)
