"""The handover from a launcher to its ranks, and the report that each rank leaves for it."""

import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from firecaffe.errors import FirecaffeError, PeerLostError
from firecaffe.faults import Fault
from firecaffe.files import create_empty
from firecaffe.output import harmless, say

LAUNCHED = "FIRECAFFE_LAUNCHED"
"""Environment variable of ranks that firecaffe's launcher started: its process number."""

REPORT = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of a rank's report to torch's elastic agent."""


def leave_report(message: str, fault: Fault | None = None, traceback: str = "") -> None:
    """Leave the line to the launcher, which prints it once for all ranks; else print it."""
    line = harmless(" ".join(message.split()))
    report = os.environ.get(REPORT)
    if report:
        extra = {"timestamp": str(int(time.time())), "time_s": time.time(), "traceback": traceback}
        if fault is not None:
            extra["fault"] = fault.as_text()
        try:
            aside = create_empty(Path(f"{report}.partial"))
            with open(aside, "w", encoding="utf-8") as file:
                json.dump({"message": {"message": line, "extraInfo": extra}}, file)
            os.replace(aside, report)
        except OSError:
            report = None
    # firecaffe's launcher prints the line, unless it is gone or finds no report.
    if not report or os.environ.get(LAUNCHED) != str(os.getppid()):
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        say(f"{rank}{line}\n{traceback}".removesuffix("\n"))


def report(error: FirecaffeError) -> int:
    """Leave the line of an error to the launcher, as `leave_report`; return its exit code."""
    leave_report(error.last_word, error.fault, error.traceback)
    return error.exit_code


def report_uncaught() -> None:
    """Let a firecaffe error that a script does not catch end it with one line and its exit code.

    At a Python prompt only the line is printed, because the session holds the user's data.
    """
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def holds_session() -> bool:
    """Return whether a prompt or a notebook runs here: the process holds a person's data."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


class _Hook:
    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, FirecaffeError):
            self.before(kind, error, trace)
            return
        with _real_stderr():
            report(error)
        if holds_session():
            return
        if isinstance(error, PeerLostError):
            end_process(error.exit_code)  # a thread may still wait for that rank
        raise SystemExit(error.exit_code)


@contextmanager
def _real_stderr() -> Iterator[None]:
    # `init_process_group` wraps our hook in one of torch's, which buffers output until our hook
    # returns. But ours ends the process instead.
    before = sys.stderr
    if isinstance(before, io.StringIO):
        sys.stderr = sys.__stderr__
    try:
        yield
    finally:
        sys.stderr = before


def end_process(exit_code: int) -> NoReturn:
    """End the process at once, because a communication thread may still wait for a lost rank."""
    # A Gloo thread that frees a tensor while the interpreter shuts down aborts the process, too
    # (torch's issue 190489).
    try:
        _remove_sockets()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # the reader of the output may be gone, or the disk full
        os._exit(exit_code)


def _remove_sockets() -> None:
    # Remove the folder for sockets that `multiprocessing` removes at the interpreter's shutdown.
    util: Any = sys.modules.get("multiprocessing.util")
    for remove in [] if util is None else list(util._finalizer_registry.values()):
        if remove._callback is util._remove_temp_dir:
            with suppress(OSError):
                remove()


HANDED = "FIRECAFFE_HANDED"
"""Environment variable of ranks: the file with the value handed to them, or empty."""


def hand(value: object, folder: Path) -> dict[str, str]:
    """Write a value for ranks into a private folder; return the ranks' variables."""
    if value is None:
        return {HANDED: ""}
    path = folder / "handed"
    path.write_bytes(pickle.dumps(value))
    return {HANDED: str(path)}


def handed() -> object:
    path = os.environ.get(HANDED)
    return pickle.loads(Path(path).read_bytes()) if path and LAUNCHED in os.environ else None
