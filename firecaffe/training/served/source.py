"""Where the events of a training come from: a clock that is logged, or a log."""

from pathlib import Path
from typing import Protocol

from firecaffe.files import GrowingFile, write_atomically
from firecaffe.synchrony.events import Event
from firecaffe.synchrony.log import EVENTS, Lines, head
from firecaffe.synchrony.tally import Tally
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.training.piece import Numbers, NumbersOfParts


class Source(Protocol):
    """Brings events, one after the other."""

    def next(self) -> Event: ...


class Clock(Source, Numbers, Protocol):
    """Brings events about. The state is JSON."""


class LoggedClock(NumbersOfParts):
    """A clock whose events are written as they come. The state is JSON."""

    def __init__(self, clock: Clock, first_version: int, learners: int) -> None:
        """first_version: of the weights before the first event. learners: at the beginning."""
        self._clock, self._head = clock, head(first_version, learners)
        self._lines, self.tally = Lines(), Tally()
        self._file: GrowingFile | None = None

    def open(self, folder: Path, checkpoint: Checkpoint | None) -> list[str]:
        """Opens the log in a run's folder, with the events up to the checkpoint that the run is
        resumed from. Returns a line for people if they are not there.
        """
        path, notes = folder / EVENTS, []
        if self._lines.count and checkpoint is not None and checkpoint.folder is not None:
            before = checkpoint.folder.parent.parent / EVENTS
            if not keep_lines(before, path, self._lines.count):
                path.unlink(missing_ok=True)
                notes.append(
                    f"warning: {before} does not have the events up to step {checkpoint.step}, so "
                    "that this run cannot be replayed"
                )
        else:
            path.unlink(missing_ok=True)  # an attempt that has saved nothing
        self._file = GrowingFile(path, goes_on=path.exists())
        if not self._lines.count:
            self._file.write(self._lines.line(self._head))
        return notes

    def next(self) -> Event:
        event = self._clock.next()
        self.tally.take(event)
        line = self._lines.event(event)
        if self._file is not None:
            self._file.write(line)
        return event

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def _parts(self) -> dict[str, Numbers]:
        return {"clock": self._clock, "lines": self._lines, "tally": self.tally}


def keep_lines(path: Path, into: Path, count: int) -> bool:
    """Copies the first lines of a log, or cuts the log there. Returns whether all are there; if
    not, nothing is written.
    """
    try:
        with open(path, encoding="ascii", newline="\n") as file:
            kept = [line for _, line in zip(range(count), file, strict=False)]
    except (OSError, UnicodeDecodeError):
        return False
    if len(kept) < count or not all(line.endswith("\n") for line in kept):
        return False
    write_atomically(into, "".join(kept))
    return True
