"""Checks events against each other: that they could have happened, in this order.

What holds of any policy: a version is made once, in order; a learner has one work at a time, at
the version of the moment, and brings that one; a gradient is applied once, and never if it was
dropped, or its leaf was to be handed out again; a leaf counts once, and is under way once, but for
who is too late. A log that breaks one of these was damaged, or was never that of a run.
"""

from firecaffe.synchrony.events import Event, Lose, Pull, Push
from firecaffe.synchrony.leaves import Leaf, Leaves
from firecaffe.synchrony.policy import Update, Work


class Ledger:
    """Keeps book of one run's events."""

    def __init__(self, version: int = 0) -> None:
        """version: that of the weights before the first event."""
        self.version = version
        self._leaves: Leaves | None = None
        self._time_s = 0.0
        self._in_flight: dict[int, Work] = {}
        self._late: set[Work] = set()
        """Those under way whose leaves are handed out again."""
        self._pending: set[Work] = set()
        self._done: set[Leaf] = set()

    def expect(self, leaves: Leaves) -> None:
        """Takes no leaf but these from here on."""
        self._leaves = leaves

    def take(self, event: Event) -> None:
        """Takes the next event. Raises: ValueError if it cannot follow the ones before."""
        _demand(event.time_s >= self._time_s, f"at {event.time_s} s after {self._time_s} s")
        self._time_s = event.time_s
        match event:
            case Pull():
                self._pull(event.work)
            case Push():
                self._push(event)
            case Lose():
                self._in_flight.pop(event.learner, None)

    def _pull(self, work: Work) -> None:
        _demand(work.learner not in self._in_flight, f"learner {work.learner} has work already")
        _demand(
            work.version == self.version,
            f"version {work.version} is pulled, the weights are at {self.version}",
        )
        self._demand_known(work.leaf)
        taken = {each.leaf for each in self._in_flight.values() if each not in self._late}
        _demand(
            work.leaf not in self._done and work.leaf not in taken,
            f"{_words(work.leaf)} is handed out again",
        )
        self._in_flight[work.learner] = work

    def _push(self, event: Push) -> None:
        is_own = self._in_flight.get(event.work.learner) == event.work
        _demand(
            is_own or not event.counts,
            f"learner {event.work.learner} brings {_words(event.work.leaf)} at version "
            f"{event.work.version}, which it has not",
        )
        if is_own:
            del self._in_flight[event.work.learner]
        if event.counts:
            leaf = event.work.leaf
            _demand(event.work not in self._late, f"{_words(leaf)} counts, and came too late")
            _demand(leaf not in self._done, f"{_words(leaf)} counts twice, or after it was dropped")
            self._pending.add(event.work)
            self._done.add(leaf)
        if event.update is not None:
            self._update(event.update)

    def _update(self, update: Update) -> None:
        _demand(
            update.version == self.version + 1,
            f"version {update.version} is made, after {self.version}",
        )
        _demand(bool(update.works), "an update of no gradient")
        _demand(len(set(update.works)) == len(update.works), "a gradient is applied twice")
        for work in update.works:
            _demand(
                work in self._pending, f"the gradient of {_words(work.leaf)} is applied, not there"
            )
            self._pending.remove(work)
        for leaf in update.dropped:
            self._demand_known(leaf)
            _demand(leaf not in self._done, f"{_words(leaf)} is dropped, and counts")
            self._done.add(leaf)
        for leaf in update.again:
            late = {work for work in self._in_flight.values() if work.leaf == leaf} - self._late
            _demand(bool(late), f"{_words(leaf)} is to be handed out again, and nobody has it")
            self._late |= late
        self.version = update.version

    def _demand_known(self, leaf: Leaf) -> None:
        known = self._leaves is None or leaf in self._leaves
        _demand(known, f"the training has no {_words(leaf)}")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _words(leaf: Leaf) -> str:
    return f"leaf {leaf.place} of step {leaf.step}"
