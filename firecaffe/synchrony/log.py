"""events.jsonl: the events of a run, a line each, and each line checked when it is read.

A line is JSON, and ends with the CRC-32 of itself and all lines before it. So a line that was
changed, lost or put elsewhere is found at its place.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from firecaffe.errors import RunError
from firecaffe.files import read_lines
from firecaffe.schema import Count, checked, decoded
from firecaffe.synchrony.events import Event, from_row, to_row
from firecaffe.synchrony.leaves import Leaves
from firecaffe.synchrony.ledger import Ledger

EVENTS = "events.jsonl"


class _Line(TypedDict):
    check: str


class _Begin(TypedDict):
    event: Literal["begin"]
    format: Literal[2]
    version: Count
    learners: Annotated[int, Meta(ge=0, le=1_000_000)]


class Lines:
    """Makes the lines of a log. The state is JSON: how far the log has got."""

    def __init__(self) -> None:
        self.count = 0
        self.check = 0

    def line(self, row: dict[str, Any]) -> bytes:
        """The next line."""
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
    """The row of the first line. first_version: of the weights before the first event. learners: as
    many are there then, numbered from 0.
    """
    return {"event": "begin", "format": 2, "version": first_version, "learners": learners}


class LogReader:
    """Reads a log, event by event."""

    def __init__(self, path: Path) -> None:
        """Raises: RunError if there is none, or its first line is not that of a log."""
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
        """The number of learners that are there at the beginning."""
        self._ledger = Ledger(begin["version"])

    def expect(self, leaves: Leaves) -> None:
        """Lets it have the leaves of a training alone: another one is damage from here on."""
        self._ledger.expect(leaves)

    @property
    def version(self) -> int:
        """The version of the weights after the events that were read."""
        return self._ledger.version

    def next(self) -> Event:
        """The next event. Raises: RunError with the line if it is damaged or missing."""
        try:
            self.number, row = next(self._rows)
        except StopIteration:
            raise RunError(
                f"{self.path} line {self.number + 1}: is not there; the run has gone on from here"
            ) from None
        try:
            event = from_row(row)
            self._ledger.take(event)
        except ValueError as error:
            raise RunError(f"{self.path} line {self.number}: {error}") from error
        return event


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a log with their line numbers. Raises: RunError."""
    lines = Lines()
    try:
        for data in read_lines(path):  # an update names all its gradients
            yield lines.count + 1, _checked(lines, data)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} {error}") from error


def _checked(lines: Lines, data: bytes) -> dict[str, Any]:
    """Raises: ValueError."""
    place = f"line {lines.count + 1}"
    if not data.endswith(b"\n"):
        raise ValueError(f"{place}: ends in its middle")
    try:
        row: dict[str, Any] = {**decoded(data, _Line)}
        check = row.pop("check")
        expected = lines.line(row)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: is no line of a log ({error!s:.80})") from error
    if expected != data:
        raise ValueError(
            f"{place}: is not what was written; its check is {check!r:.20}, expected "
            f"'{lines.check:08x}' for it and the lines before"
        )
    return row
