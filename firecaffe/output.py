"""stdout and stderr that may be lost: a reader that leaves, or a full disk, costs the output alone.

What a stream does not take is dropped, and so is all that follows: a training does not end because
nobody looks on. A command whose output is all that it is for ends instead (`OutputLostError`).
"""

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from firecaffe.errors import OutputLostError

STDOUT, STDERR = "stdout", "stderr"

NUMBERS = {STDOUT: 1, STDERR: 2}
"""Their file descriptors."""

LOST: dict[str, str] = {}
"""The streams of this process that take no more, and why."""


class Output:
    """A text stream in whose place this stands, whose errors of the system end nothing."""

    is_shared = False
    """Whether ranks print to the same, who say if it is lost: that is said once."""

    def __init__(self, stream: TextIO | None, name: str, goes_on: bool = True) -> None:
        """stream: None drops all. name: STDOUT or STDERR. goes_on: whether there is more to do than
        to print.
        """
        self._stream, self._name, self._goes_on = stream, name, goes_on

    def write(self, text: str) -> int:
        """Raises: OutputLostError if there is no more to do."""
        try:
            if self._stream is not None:
                self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Raises: as `write`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Raises: OutputLostError if there is no more to do."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        is_new = self._name not in LOST
        LOST.setdefault(self._name, reason)
        with suppress(OSError, ValueError, AttributeError):  # not all streams are files
            assert self._stream is not None
            _to_nothing(self._stream.fileno())
        if not self._goes_on:
            lost = OutputLostError(f"{self._name}: {reason}")
            lost.has_left = error.errno == errno.EPIPE
            raise lost from error
        if is_new and self._name == STDOUT and not self.is_shared:
            line = f"stdout takes no more ({reason}): what it would show is lost, all else goes on"
            print(f"firecaffe: {line}", file=kept_stderr(), flush=True)


def kept_stdout() -> TextIO:
    """This process's stdout, for lines that may be lost."""
    return _kept(sys.stdout, STDOUT)


def kept_stderr() -> TextIO:
    """This process's stderr, for lines that may be lost."""
    return _kept(sys.stderr, STDERR)


def share_with_ranks() -> None:
    """Leaves it to the ranks of this process to say that stdout, theirs too, is lost."""
    if isinstance(sys.stdout, Output):
        sys.stdout.is_shared = True


@contextmanager
def outputs_kept(goes_on: bool) -> Iterator[None]:
    """Lets all that is printed in the block, by whom ever, go to an `Output`.

    goes_on: whether the process has more to do than to print.
    """
    before = sys.stdout, sys.stderr
    LOST.clear()
    for name, stream in ((STDOUT, sys.stdout), (STDERR, sys.stderr)):
        if stream is None:
            LOST[name] = "closed"
            if not _is_open(NUMBERS[name]):  # else what is opened next has that number
                _to_nothing(NUMBERS[name])
    sys.stdout = cast(TextIO, Output(before[0], STDOUT, goes_on))
    sys.stderr = cast(TextIO, Output(before[1], STDERR))
    try:
        yield
    finally:
        with suppress(OutputLostError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def _kept(stream: TextIO | None, name: str) -> TextIO:
    return cast(TextIO, stream if isinstance(stream, Output) else Output(stream, name))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_nothing(number: int) -> None:
    """Lets a file descriptor write to nothing; what is buffered for it then fails nobody."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)
