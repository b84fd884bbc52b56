"""The kinds of errors, each with the exit code that the shell sees, and whose code raised one.

docs/reference/errors.md lists the codes, made from this file.
A message is one line: what is wrong, what was given, what is expected, and the recipe's field.
"""

import errno
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from typing import Literal

from firecaffe.faults import SAVED, Fault

Owner = Literal["firecaffe", "library", "user"]

PACKAGE = Path(__file__).parent
"""This package's folder. The clone around it, perhaps of the same name, holds user code."""

LIBRARIES = ("site-packages", "dist-packages")


def whose(file: str) -> Owner:
    """Return the owner of a file named by a traceback's frame; code without a file is Python's.

    Only folders that Python searches are a library's. Paths are compared as given and resolved.
    """
    if file.startswith("<"):
        return "library"
    if _is_in(file, [PACKAGE]):
        return "firecaffe"
    return "library" if _is_in(file, _folders_of_libraries()) else "user"


def _folders_of_libraries() -> list[Path]:
    paths = sysconfig.get_paths()
    return [
        *(Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *map(Path, [*site.getsitepackages(), site.getusersitepackages()]),
        # Only those on the path count, because a user's project may lie in a folder of that name.
        *(path for path in map(Path, sys.path) if path.name in LIBRARIES),
    ]


def _is_in(file: str, folders: Iterable[Path]) -> bool:
    files = _names(file)
    names = [name for folder in folders for name in _names(folder)]
    return any(path.is_relative_to(name) for path in files for name in names)


def _names(path: str | Path) -> set[Path]:
    return {Path(os.path.abspath(path)), Path(os.path.realpath(path))}


def own_traceback(error: BaseException) -> str:
    """Return the traceback after firecaffe's last frame, if user code follows it; else empty."""
    frames = _later_frames(error)
    is_own = any(whose(frame.filename) == "user" for frame in frames)
    return _formatted(error, frames) if is_own else ""


def _later_frames(error: BaseException) -> list[FrameSummary]:
    frames = extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if whose(frame.filename) == "firecaffe"]
    return frames[ours[-1] + 1 :] if ours else []


def _formatted(error: BaseException, frames: list[FrameSummary]) -> str:
    shown = TracebackException.from_exception(error)  # with the errors that it was raised from
    shown.stack = StackSummary.from_list(
        [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    )
    return "".join(shown.format())


class FirecaffeError(Exception):
    """An error that is explained in one line instead of a traceback."""

    exit_code = 1
    fault: Fault | None = None
    """The fault, if a rank has one; else None."""
    is_secondary = False
    """Whether another rank reports the error."""

    @property
    def last_word(self) -> str:
        """The line for the user: that of the fault, unless the message itself is better."""
        return str(self) if self.fault is None or self.fault.kind in SAVED else self.fault.line

    @property
    def traceback(self) -> str:
        """The traceback of user code that raised, to print below the line; else empty."""
        return ""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show, equal to those of a script."""
        return [f"firecaffe: {self.last_word}", *self.traceback.splitlines()]


class RecipeError(FirecaffeError):
    """The recipe, the command line or an argument asks for something invalid or impossible."""

    exit_code = 2


class OwnCodeError(RecipeError):
    """User code, named by a recipe or given to a function, raised. Its error is `__cause__`."""

    remote_traceback = ""
    """The traceback as text, if the code raised in another process."""

    @property
    def traceback(self) -> str:
        """The traceback of the cause, from where it enters the user's code."""
        cause = self.__cause__
        if self.remote_traceback or cause is None:
            return self.remote_traceback
        return _formatted(cause, _later_frames(cause) or list(extract_tb(cause.__traceback__)))


class DataError(FirecaffeError):
    """A data set is missing, truncated or not what its name says."""

    exit_code = 3


class CheckpointError(FirecaffeError):
    """A checkpoint is missing, damaged, cannot be written, or belongs to another recipe."""

    exit_code = 4


class UnfitCheckpointError(CheckpointError):
    """A named checkpoint is absent, or of another recipe, network or length. The disk is intact."""


class AgreementError(FirecaffeError):
    """The ranks do not run the same recipe, code, data or model."""

    exit_code = 5


class LaunchError(FirecaffeError):
    """The ranks could not be started or could not find each other."""

    exit_code = 6


class NotIdenticalError(FirecaffeError):
    """Runs that should end with the same bits do not, or the sum of an exchange is wrong."""

    exit_code = 7


class RunError(FirecaffeError):
    """A run folder or a file cannot be read or written, exists already, is gone, or is no run's."""

    exit_code = 8


class OutputLostError(RunError):
    """The output of a command that only prints cannot be written."""

    has_left = False
    """Whether the reader, for example `head`, closed the pipe. Then no message is needed."""


class PeerLostError(FirecaffeError, RuntimeError):
    """Another rank is gone, frozen, unreachable or behind, or reported its own failure.

    It is a RuntimeError because `backward()` of a process group raises one. The exit code is that
    of `fault`; 9 if nobody knows the fault.
    """

    exit_code = 9

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        if fault is not None:
            self.exit_code = fault.exit_code

    @classmethod
    def of(cls, fault: Fault) -> "PeerLostError":
        """Make the error of a fault."""
        return cls(fault.line, fault)

    @property
    def rank(self) -> int | None:
        """The rank that is lost; None if it is not known."""
        return None if self.fault is None else self.fault.rank

    @property
    def host(self) -> str:
        """The host of that rank; empty if it is not known."""
        return "" if self.fault is None else self.fault.host

    @property
    def step(self) -> int:
        """The step in progress, counted from 1; 0 before the first step or if unknown."""
        return 0 if self.fault is None else self.fault.step

    @property
    def kind(self) -> str:
        """The kind of fault, a row of docs/explanation/faults.md; `gone` if unknown."""
        return "gone" if self.fault is None else self.fault.kind


class MemoryFullError(FirecaffeError):
    """The host, the device or the memory limit of this process has no memory left."""

    exit_code = 14


FULL = (
    *("can't allocate memory", "cannot allocate memory", "unable to allocate", "out of memory"),
    *("failed to map segment", "can't start new thread"),
)
"""Texts of memory errors without a class: of torch's allocator, mmap, libraries and threads."""


def memory_full(error: BaseException) -> MemoryFullError | None:
    """Return an error without rank or step if lack of memory caused `error`, else None."""
    cause: BaseException | None = error
    while cause is not None and not _is_memory_full(cause):
        cause = cause.__cause__
    if cause is None:
        return None
    said = " ".join(str(cause).split()) or type(cause).__name__
    return MemoryFullError(
        f"out of memory: {said:.300}; take smaller batches, or give this process more (ulimit -v, "
        "the container's limit)"
    )


def _is_memory_full(error: BaseException) -> bool:
    kinds = {base.__name__ for base in type(error).__mro__}  # torch may not be loaded yet
    if isinstance(error, MemoryError | MemoryFullError) or "OutOfMemoryError" in kinds:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_foreign = isinstance(error, RuntimeError | ImportError | OSError)
    is_foreign = is_foreign and not isinstance(error, FirecaffeError)
    return is_foreign and any(word in str(error).lower() for word in FULL)


def file_error(error: OSError, where: str = "") -> RunError | None:
    """Return the error for a file that cannot be read or written; None for other errors.

    where: a prefix of the line. Also None for full memory, and for a fault that has a line.
    """
    has_words = isinstance(error, FirecaffeError) or getattr(error, "fault", None) is not None
    if not error.filename or has_words or error.errno == errno.ENOMEM:
        return None
    return RunError(
        f"{where}{os.fsdecode(error.filename)}: cannot be read or written "
        f"({error.strerror or error}); free the disk, or name another place"
    )


class WorkerKilledError(FirecaffeError):
    """A signal ended a rank, as its launcher reports, or a process that makes samples for it."""

    exit_code = 10


class LauncherLostError(FirecaffeError):
    """The process that started this rank is gone. The rank has saved a checkpoint."""

    exit_code = 15


class NotKeptError(FirecaffeError):
    """A larger batch, or a smaller network, lost more accuracy than allowed."""

    exit_code = 16


class NotEnoughError(FirecaffeError):
    """There are too few seeds to decide whether a larger batch kept the accuracy."""

    exit_code = 17


class NotFiniteError(FirecaffeError):
    """The loss, a gradient or a weight is infinite or NaN. All ranks detect it together."""

    exit_code = 18
    step = 0
    """The step of these numbers, counted from 1; 0 for the step in progress."""


class DivergedError(FirecaffeError):
    """The loss stayed far above its start. All ranks end together."""

    exit_code = 19
    step = 0
    """The last step whose loss is known, counted from 1."""


class LeftOutError(FirecaffeError):
    """A Caffe file asks for something that the recipe written from it does not contain."""

    exit_code = 20


class PreemptedError(FirecaffeError):
    """The run was asked to stop, and has saved a checkpoint."""

    exit_code = 75
