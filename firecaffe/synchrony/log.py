"""events.jsonl: the events of a run, one per line, and the checks of a log.

A line is JSON and ends with the CRC-32 of itself and all lines before it, so damage is detected at
its place. Under any policy, versions are made once, in order. A learner has one work at a time, at
the present version, and delivers that work. A gradient is applied once, and never if it was dropped
or its leaf is handed out again. Two learners have the same leaf only if one of them is late.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from firecaffe.errors import RunError
from firecaffe.files import read_lines
from firecaffe.schema import Count, checked, decoded
from firecaffe.synchrony.events import Event, Lose, Pull, Push, from_row, to_row
from firecaffe.synchrony.server_policies import Leaf, Leaves, Update, Work


class Ledger:
    """Checks that the events of a run are consistent."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._leaves: Leaves | None = None
        self._time_s = 0.0
        self._in_flight: dict[int, Work] = {}
        self._late: set[Work] = set()
        """Works under way whose leaves are to be handed out again."""
        self._pending: set[Work] = set()
        self._done: set[Leaf] = set()

    def expect(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def take(self, event: Event) -> None:
        """Check the next event. Raises: ValueError if it cannot follow the events before it."""
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
        taken = {other.leaf for other in self._in_flight.values() if other not in self._late}
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


EVENTS = "events.jsonl"


class _Line(TypedDict):
    check: str


class _Begin(TypedDict):
    event: Literal["begin"]
    format: Literal[2]
    version: Count
    learners: Annotated[int, Meta(ge=0, le=1_000_000)]


class Lines:
    """Makes the lines of a log. Its state is JSON: the number of lines and their check."""

    def __init__(self) -> None:
        self.count = 0
        self.check = 0

    def line(self, row: dict[str, Any]) -> bytes:
        body = json.dumps(row, allow_nan=False)
        self.check = zlib.crc32(body.encode(), self.check)
        self.count += 1
        return f'{body[:-1]}, "check": "{self.check:08x}"}}\n'.encode()

    def event(self, event: Event) -> bytes:
        return self.line(to_row(event))

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.count, "check": self.check}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.check = state["lines"], state["check"]


def head(first_version: int, learners: int) -> dict[str, Any]:
    """Return the first line's row: version and number of learners before the first event."""
    return {"event": "begin", "format": 2, "version": first_version, "learners": learners}


class LogReader:
    def __init__(self, path: Path) -> None:
        """Open a log. Raises: RunError if there is none, or its first line does not begin a log."""
        self.path = path
        self._rows = _rows(path)
        try:
            self.number, first = next(self._rows)
        except StopIteration:
            raise RunError(f"{path} line 1: is not there; the log is empty") from None
        try:
            begin = checked(first, _Begin)
        except ValueError as error:
            raise RunError(f"{path} line 1: is not the beginning of a log ({error})") from error
        self.learners = begin["learners"]
        self._ledger = Ledger(begin["version"])
        self._followers = list[Callable[[Event], None]]()

    def add_follower(self, follow: Callable[[Event], None]) -> None:
        """Call `follow` with each event; it raises ValueError for an event that cannot be."""
        self._followers.append(follow)

    def expect(self, leaves: Leaves) -> None:
        self._ledger.expect(leaves)

    @property
    def version(self) -> int:
        return self._ledger.version

    def next(self) -> Event:
        """Return the next event. Raises: RunError, with the line, if that is damaged or missing."""
        try:
            self.number, row = next(self._rows)
        except StopIteration:
            raise RunError(
                f"{self.path} line {self.number + 1}: is not there; the run has gone on from here"
            ) from None
        try:
            event = from_row(row)
            for take in (self._ledger.take, *self._followers):
                take(event)
        except ValueError as error:
            raise RunError(f"{self.path} line {self.number}: {error}") from error
        return event


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = Lines()
    try:
        for data in read_lines(path):  # lines may be long: an update names all its gradients
            yield lines.count + 1, _checked(lines, data)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} {error}") from error


def _checked(lines: Lines, data: bytes) -> dict[str, Any]:
    place = f"line {lines.count + 1}"
    if not data.endswith(b"\n"):
        raise ValueError(f"{place}: is cut off")
    try:
        row: dict[str, Any] = {**decoded(data, _Line)}
        check = row.pop("check")
        expected = lines.line(row)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: is not a log entry ({error!s:.80})") from error
    if expected != data:
        raise ValueError(
            f"{place}: is not what was written; its check is {check!r:.20}, expected "
            f"'{lines.check:08x}' for it and the lines before"
        )
    return row
