"""The protocol of a policy: who computes which leaf at which version, and what becomes of it.

A policy decides on events and knows nothing else: no time, no thread, no tensor. The same object
serves a simulated clock and real workers:

    begin        a learner asks for work: a leaf at the present version, or it has to wait
    contribute   a gradient arrived: it counts, or it is dropped
    commit       whether an update is due, and of which gradients
    lose, join   a learner is gone: its leaf goes to others; a learner comes

A *version* is the number of updates that a copy of the weights has seen; a gradient's *staleness*
is the version that it is applied to minus the version that it was computed at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from firecaffe.synchrony.leaves import Leaf, LeafQueue


@dataclass(frozen=True)
class Work:
    """A leaf that a learner computes at a version of the weights."""

    learner: int
    leaf: Leaf
    version: int


@dataclass(frozen=True)
class Update:
    """One update of the weights: by the mean of the gradients of `works`, added by the tree in the
    order of their leaves, with zeros for those of `dropped`.
    """

    version: int
    """The version that it makes."""
    works: tuple[Work, ...]
    """In the order of their leaves."""
    dropped: tuple[Leaf, ...] = ()
    """Leaves that will not be waited for. Their samples are lost."""
    again: tuple[Leaf, ...] = ()
    """Leaves that will not be waited for either, but are handed out again."""

    def staleness(self, work: Work) -> int:
        return self.version - 1 - work.version


class Policy(Protocol):
    """A row of `SYNCHRONY`. All its state is JSON."""

    @property
    def version(self) -> int:
        """The number of updates so far."""

    @property
    def learners(self) -> set[int]:
        """Those that are there."""

    def begin(self, learner: int) -> Work | None:
        """The next work of a learner that has none; None if it has to wait."""

    def contribute(self, work: Work) -> bool:
        """Takes the gradient of a work. Returns whether it counts; if not, it is dropped. So is
        that of a learner which was lost meanwhile.
        """

    def commit(self) -> Update | None:
        """The update that is due, which makes a new version; None if none is."""

    def lose(self, learner: int) -> None:
        """A learner is gone; others get its leaf."""

    def join(self, learner: int) -> None:
        """A learner comes, for the first time or again."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Desk:
    """What every policy has: the queue, the version, who is there, and who computes what. A policy
    subclasses it, and decides who has to wait and which gradients count.
    """

    def __init__(self, queue: LeafQueue, learners: int, version: int) -> None:
        self.queue, self.version = queue, version
        self.learners = set(range(learners))
        self.in_flight: dict[int, Work] = {}

    def hand_out(self, learner: int) -> Work:
        """Gives a learner the next leaf. Raises: ValueError if it has one, or is not there."""
        if learner in self.in_flight or learner not in self.learners:
            raise ValueError(f"learner {learner} asks for work, and has some or is not there")
        work = Work(learner, self.queue.take(), self.version)
        self.in_flight[learner] = work
        return work

    def take_back(self, work: Work) -> bool:
        """A learner brings its work. Returns whether it is the one that it was given."""
        if self.in_flight.get(work.learner) != work:
            return False
        del self.in_flight[work.learner]
        return True

    def take_off(self, learner: int) -> Work | None:
        """Takes a learner off. Returns the work that it had."""
        self.learners.discard(learner)
        return self.in_flight.pop(learner, None)

    def join(self, learner: int) -> None:
        self.learners.add(learner)

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "queue": self.queue.state_dict(),
            "learners": sorted(self.learners),
            "in_flight": [row_of(work) for work in self.in_flight.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.version = state["version"]
        self.queue.load_state_dict(state["queue"])
        self.learners = set(state["learners"])
        works = [work_of(row) for row in state["in_flight"]]
        self.in_flight = {work.learner: work for work in works}


def row_of(work: Work) -> list[int]:
    """A work as JSON."""
    return [work.learner, *work.leaf, work.version]


def work_of(row: Sequence[int]) -> Work:
    learner, step, place, version = row
    return Work(learner, Leaf(step, place), version)
