"""stdout and stderr that may fail without ending the process.

If the reader leaves or the disk is full, that text and all later text are dropped: lost output must
not end a training. A command that only prints ends instead (`OutputLostError`).

Names that are printed may be a stranger's, so control sequences are removed, except those for
colors, the cursor's position and links.
"""

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from firecaffe.errors import OutputLostError

STDOUT, STDERR = "stdout", "stderr"

NUMBERS = {STDOUT: 1, STDERR: 2}

_CONTROL = r"\x00-\x06\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f"
# Programs draw with ESC [ … letter (ECMA-48's CSI) and make links with ESC ] 8 ; …, as rich's log
# does. Both are kept. Others are removed: they set titles or the clipboard, or query the terminal.
_DRAWS = r"\[[0-9;?]*[A-HJKSTfhlm]"
_LINKS = r"\]8;[ -~]*(?:\x1b\\|\x07)"
ORDERS = re.compile(rf"(\x1b(?:{_DRAWS}|{_LINKS}))|[\x1b{_CONTROL}]")
CONTROL = re.compile(rf"[\x07\x08\r\x1b{_CONTROL}]")
REPLACEMENT = "\ufffd"
"""Unicode's replacement character."""


def harmless(text: str) -> str:
    """Replace all control characters except tabs and line ends."""
    return CONTROL.sub(REPLACEMENT, text)


LOST: dict[str, str] = {}
"""The streams of this process that failed, each with the reason."""


class Output:
    """A text stream that wraps another, and drops its text once a write has failed."""

    is_shared = False
    """Whether ranks print to the same stream and report its loss, so that this process does not."""

    def __init__(self, stream: TextIO | None, name: str, goes_on: bool = True) -> None:
        """Wrap a stream; None drops all. Unless `goes_on`, failed writes raise OutputLostError."""
        self._stream, self._name, self._goes_on = stream, name, goes_on

    def write(self, text: str) -> int:
        try:
            if self._stream is not None:
                self._stream.write(ORDERS.sub(lambda order: order[1] or REPLACEMENT, text))
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
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
            _to_devnull(self._stream.fileno())
        if not self._goes_on:
            lost = OutputLostError(f"{self._name}: {reason}")
            lost.has_left = error.errno == errno.EPIPE
            raise lost from error
        if is_new and self._name == STDOUT and not self.is_shared:
            line = f"stdout takes no more ({reason}): what it would show is lost, all else goes on"
            say(line)


def kept_stdout() -> TextIO:
    """Return this process's stdout, for lines that may be lost."""
    return _kept(sys.stdout, STDOUT)


def say(line: str) -> None:
    """Print a line of ours to this process's stderr, which may be lost."""
    print(f"firecaffe: {line}", file=_kept(sys.stderr, STDERR), flush=True)


def share_with_ranks() -> None:
    """Let the ranks of this process report the loss of stdout, which they share."""
    if isinstance(sys.stdout, Output):
        sys.stdout.is_shared = True


@contextmanager
def outputs_kept(goes_on: bool) -> Iterator[None]:
    """Replace stdout and stderr by `Output` in the block. `goes_on` is that of stdout."""
    before = sys.stdout, sys.stderr
    LOST.clear()
    for name, stream in ((STDOUT, sys.stdout), (STDERR, sys.stderr)):
        if stream is None:
            LOST[name] = "closed"
            if not _is_open(NUMBERS[name]):  # otherwise the next opened file would get its number
                _to_devnull(NUMBERS[name])
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


def _to_devnull(number: int) -> None:
    """Redirect a file descriptor to the null device, so that buffered text causes no error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)
