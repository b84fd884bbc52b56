"""The protocol of a policy, which decides who computes which leaf at which version.

A policy knows events, but no time, thread or tensor. So it serves both clocks:

    begin        a learner asks for work: a leaf at the present version, or it has to wait
    contribute   a gradient arrived: it counts, or it is dropped
    commit       whether an update is due, and of which gradients
    lose, join   a learner is lost, and others get its leaf; a learner joins

A *version* is the number of updates that a copy of the weights has received. A gradient's
*staleness* is the version that it is applied to minus the version that it was computed at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from firecaffe.synchrony.leaves import Leaf, LeafQueue


@dataclass(frozen=True)
class Work:
    learner: int
    leaf: Leaf
    version: int


@dataclass(frozen=True)
class Update:
    """An update by the mean of gradients: a tree sum in leaf order, with zeros for dropped ones."""

    version: int
    works: tuple[Work, ...]
    dropped: tuple[Leaf, ...] = ()
    """Leaves that are no longer waited for. Their samples are lost."""
    again: tuple[Leaf, ...] = ()
    """Leaves that are no longer waited for, but are handed out again."""

    def staleness(self, work: Work) -> int:
        return self.version - 1 - work.version


class Policy(Protocol):
    """The protocol of a policy. All its state is JSON."""

    @property
    def version(self) -> int: ...

    @property
    def learners(self) -> set[int]: ...

    def begin(self, learner: int) -> Work | None:
        """Return the next work of a learner that has none, or None if it has to wait."""

    def contribute(self, work: Work) -> bool:
        """Receive a gradient; return False if it is dropped, as those of lost learners are."""

    def commit(self) -> Update | None:
        """Return the update that is due, which makes a new version, or None."""

    def lose(self, learner: int) -> None: ...

    def join(self, learner: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Desk:
    """The base of policies. A subclass decides who has to wait and which gradients count."""

    def __init__(self, queue: LeafQueue, learners: int, version: int) -> None:
        self.queue, self.version = queue, version
        self.learners = set(range(learners))
        self.in_flight: dict[int, Work] = {}

    def hand_out(self, learner: int) -> Work:
        """Give a learner the next leaf. Raises: ValueError if it has one or is not there."""
        if learner in self.in_flight or learner not in self.learners:
            raise ValueError(f"learner {learner} asks for work, and has some or is not there")
        work = Work(learner, self.queue.take(), self.version)
        self.in_flight[learner] = work
        return work

    def take_back(self, work: Work) -> bool:
        if self.in_flight.get(work.learner) != work:
            return False
        del self.in_flight[work.learner]
        return True

    def take_off(self, learner: int) -> Work | None:
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
    return [work.learner, *work.leaf, work.version]


def work_of(row: Sequence[int]) -> Work:
    learner, step, place, version = row
    return Work(learner, Leaf(step, place), version)
