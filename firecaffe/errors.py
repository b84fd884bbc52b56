"""What can go wrong, each kind with the exit code that the shell sees.

A message is one line for the user: what is wrong, what was found, what would be right, with
the dotted recipe name where there is one. docs/usage.md lists the codes.
"""

import errno
from traceback import FrameSummary, extract_tb, format_exception_only, format_list

from firecaffe.faults import SAVED, Fault
from firecaffe.whose_code import whose


def own_traceback(error: BaseException) -> str:
    """The traceback of an error that nobody foresaw, from where it leaves firecaffe for the last
    time, if it then meets code that is not installed: a user's. Else empty.
    """
    frames = _outside(error)
    is_own = any(whose(frame.filename) == "user" for frame in frames)
    return _formatted(error, frames) if is_own else ""


def _outside(error: BaseException) -> list[FrameSummary]:
    """The frames after the last of firecaffe's."""
    frames = extract_tb(error.__traceback__)
    ours = [place for place, frame in enumerate(frames) if whose(frame.filename) == "firecaffe"]
    return frames[ours[-1] + 1 :] if ours else []


def _formatted(error: BaseException, frames: list[FrameSummary]) -> str:
    shown = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    told = format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *format_list(shown), *told])


class FirecaffeError(Exception):
    """A fault that is explained in one line instead of a traceback."""

    exit_code = 1
    fault: Fault | None = None
    """What has happened to which rank, where that is known."""
    goes_along = False
    """Whether it is another rank that tells of it."""

    @property
    def last_word(self) -> str:
        """What to tell the user in the end: the fault, where that is not said better here."""
        return str(self) if self.fault is None or self.fault.kind in SAVED else self.fault.line

    @property
    def traceback(self) -> str:
        """The traceback of a user's own code that has raised, to be read below the line."""
        return ""

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show of it: the line, as a script ends with."""
        return [f"firecaffe: {self.last_word}", *self.traceback.splitlines()]


class RecipeError(FirecaffeError):
    """The recipe, the command line or an argument asks for something that cannot be."""

    exit_code = 2


class OwnCodeError(RecipeError):
    """The code of a user, named by a recipe or given to a function, has raised; its own error is
    the cause. The traceback is the user's to read.
    """

    told = ""
    """The traceback, if it was another process that the code has raised in."""

    @property
    def traceback(self) -> str:
        """That of the cause, from where it leaves firecaffe for the last time."""
        cause = self.__cause__
        if self.told or cause is None:
            return self.told
        return _formatted(cause, _outside(cause) or list(extract_tb(cause.__traceback__)))


class DataError(FirecaffeError):
    """A data set is missing, truncated or not what its name says."""

    exit_code = 3


class CheckpointError(FirecaffeError):
    """A checkpoint is missing, damaged or belongs to another recipe."""

    exit_code = 4


class UnfitCheckpointError(CheckpointError):
    """There is no checkpoint where one was named, or it is whole and of another recipe, network or
    length. No disk is to blame.
    """


class AgreementError(FirecaffeError):
    """The ranks do not run the same recipe, code or model."""

    exit_code = 5


class LaunchError(FirecaffeError):
    """The ranks could not be started or could not find each other."""

    exit_code = 6


class NotIdenticalError(FirecaffeError):
    """Runs that should end in the same bits do not."""

    exit_code = 7


class RunError(FirecaffeError):
    """A run folder cannot be written, or is not one."""

    exit_code = 8


class OutputLostError(RunError):
    """What a command prints, which is all that it is for, cannot be written."""

    has_left = False
    """Whether its reader, as `head`, has left: it has seen enough, and nothing is to be said."""


class PeerLostError(FirecaffeError, RuntimeError):
    """Another rank is gone, frozen, cut off or behind; or told that it has failed. A RuntimeError,
    as `backward()` raises it of a process group.

    `fault` says who and how, and the exit code is that of its kind; None if nobody knows.
    """

    exit_code = 9

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        if fault is not None:
            self.exit_code = fault.exit_code

    @classmethod
    def of(cls, fault: Fault) -> "PeerLostError":
        """The error of a fault, with its line."""
        return cls(fault.line, fault)

    @property
    def rank(self) -> int | None:
        """The rank that is lost; None if nobody knows."""
        return None if self.fault is None else self.fault.rank

    @property
    def host(self) -> str:
        """Its host; empty if nobody knows."""
        return "" if self.fault is None else self.fault.host

    @property
    def step(self) -> int:
        """The step under way, counted from 1; 0 before the first, or if nobody knows."""
        return 0 if self.fault is None else self.fault.step

    @property
    def kind(self) -> str:
        """What has happened to it, a row of docs/faults.md; gone if nobody knows."""
        return "gone" if self.fault is None else self.fault.kind


class MemoryFullError(FirecaffeError):
    """This process's host, its device or its limit has no memory left."""

    exit_code = 14


FULL = (
    *("can't allocate memory", "cannot allocate memory", "unable to allocate", "out of memory"),
    *("failed to map segment", "can't start new thread"),
)
"""What errors say that have no class of their own: of torch's allocator, of mmap, of a library that
is loaded, of a thread that finds no room for its stack.
"""


def memory_full(error: BaseException) -> MemoryFullError | None:
    """The error of ours for one that comes of memory that ran out, at first or at last; None for
    any other. The line says no rank and no step.
    """
    found: BaseException | None = error
    while found is not None and not _is_memory_full(found):
        found = found.__cause__
    if found is None:
        return None
    said = " ".join(str(found).split()) or type(found).__name__
    return MemoryFullError(
        f"out of memory: {said:.300}; take smaller batches, or give this process more (ulimit -v, "
        "the container's limit)"
    )


def _is_memory_full(error: BaseException) -> bool:
    kinds = {each.__name__ for each in type(error).__mro__}  # torch may not be loaded yet
    if isinstance(error, MemoryError | MemoryFullError) or "OutOfMemoryError" in kinds:
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_foreign = isinstance(error, RuntimeError | ImportError | OSError)
    is_foreign = is_foreign and not isinstance(error, FirecaffeError)
    return is_foreign and any(word in str(error).lower() for word in FULL)


class LauncherLostError(FirecaffeError):
    """The process that has started this rank is gone; the rank has saved where it stands."""

    exit_code = 15


class NotKeptError(FirecaffeError):
    """A larger batch, or a smaller network, has lost more accuracy than was allowed."""

    exit_code = 16


class NotEnoughError(FirecaffeError):
    """Too few seeds to say whether a larger batch has kept the accuracy."""

    exit_code = 17


class NotFiniteError(FirecaffeError):
    """The loss, a gradient or a weight is infinite or not a number. All ranks find it together."""

    exit_code = 18
    step = 0
    """The step whose numbers they are, counted from 1; 0 if it is the one under way."""


class DivergedError(FirecaffeError):
    """The loss has stayed far above its start. All ranks end together."""

    exit_code = 19
    step = 0
    """The last step whose loss is known, counted from 1."""


class LeftOutError(FirecaffeError):
    """A file of Caffe's asks for something that was left out of its recipe, which is written."""

    exit_code = 20


class PreemptedError(FirecaffeError):
    """The run was asked to stop, and has saved where it stands."""

    exit_code = 75
