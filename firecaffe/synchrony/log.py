"""events.jsonl: the events of a run, a line each, and each line checked when it is read.

A line is JSON, and ends with the CRC-32 of itself and all lines before it. So a line that was
changed, lost or put elsewhere is found at its place.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firecaffe.errors import RunError
from firecaffe.synchrony.events import Event, from_row, to_row
from firecaffe.synchrony.ledger import Ledger

EVENTS = "events.jsonl"
MOST_BYTES = 16_000_000
"""The length of a line that is read at most: an update names all its gradients."""


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
        numbers = [first.get(word, -1) for word in ("version", "learners")]
        if not all(type(n) is int and n >= 0 for n in numbers) or first != head(*numbers):
            raise RunError(f"{path} line 1: is not the beginning of a log")
        version, self.learners = numbers
        """The number of learners that are there at the beginning."""
        self._ledger = Ledger(version)

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
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = str(error) if isinstance(error, ValueError) else repr(error)
            raise RunError(f"{self.path} line {self.number}: {said}") from error
        return event


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a log with their line numbers. Raises: RunError."""
    lines = Lines()
    try:
        with open(path, "rb") as file:
            while data := file.readline(MOST_BYTES):
                yield lines.count + 1, _checked(path, lines, data)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error


def _checked(path: Path, lines: Lines, data: bytes) -> dict[str, Any]:
    place = f"{path} line {lines.count + 1}"
    if not data.endswith(b"\n"):
        raise RunError(f"{place}: ends in its middle")
    try:
        row = json.loads(data)
        check = row.pop("check")
        expected = lines.line(row)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{place}: is no line of a log ({error!r:.80})") from error
    if expected != data:
        raise RunError(
            f"{place}: is not what was written; its check is {check!r:.20}, expected "
            f"'{lines.check:08x}' for it and the lines before"
        )
    return dict(row)
