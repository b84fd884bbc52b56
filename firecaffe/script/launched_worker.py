"""A worker of `firecaffe.launch`: `python -m firecaffe.script.launched_worker FOLDER`."""

import atexit
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # torch, interrupted while it is loaded, would have a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from firecaffe.cluster.handover import end_process, leave_report, report
from firecaffe.errors import (
    FirecaffeError,
    PeerLostError,
    RecipeError,
    memory_full,
    own_traceback,
)
from firecaffe.faults import Fault
from firecaffe.output import outputs_kept
from firecaffe.script.launch import CALL, CALLER, RETURNED, Caller
from firecaffe.user_code import failed, packed, shown

INTERRUPTED = 130


def main(folder: Path) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    caller: Caller = pickle.loads((folder / CALLER).read_bytes())
    sys.path[:], sys.argv[:] = caller.path, caller.argv
    torch.set_default_dtype(caller.dtype)
    with outputs_kept(goes_on=True):
        return _ended(folder, caller)


def _ended(folder: Path, caller: Caller) -> int:
    try:
        value = _call(folder, caller.function)
        if os.environ["RANK"] == "0":
            _hand_back(folder, caller.function, value)
        return 0
    except KeyboardInterrupt:
        leave_report("interrupted")
        end_process(INTERRUPTED)  # a normal exit may wait for other ranks, as Gloo's threads do
    except Exception as error:
        full = memory_full(error) if getattr(error, "fault", None) is None else None
        # The other ranks end at once, and the launcher asks this one to: its exit code is its own.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exit_code = _told(full or error, caller)
        signal.signal(signal.SIGTERM, lambda *_: end_process(exit_code))  # a thread may go on
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # Python resets handlers
        return exit_code


def _told(error: Exception, caller: Caller) -> int:
    if isinstance(error, FirecaffeError):
        exit_code = report(error)
        if isinstance(error, PeerLostError):
            end_process(exit_code)  # a thread may still wait for that rank
        return exit_code
    fault: Fault | None = getattr(error, "fault", None)
    line = str(failed(caller.function, error)) if fault is None else fault.line
    text = own_traceback(error)
    if not text:  # of code without a file, as a prompt's: all but this module's frames
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(error.with_traceback(trace)))
    leave_report(line, fault, text)
    return FirecaffeError.exit_code


def _call(folder: Path, name: str) -> Any:
    try:
        function, arguments, words = pickle.loads((folder / CALL).read_bytes())
    except Exception as error:
        raise failed(f"launch: loading {name} in a worker", error) from error
    try:
        return function(*arguments, **words)
    except SystemExit as end:
        if end.code in (None, 0):
            return None
        code = end.code if isinstance(end.code, int) else FirecaffeError.exit_code
        ended = FirecaffeError(f"{name} ended its process with {shown(end.code)}")
        ended.exit_code = code
        raise ended from None


def _hand_back(folder: Path, name: str, value: Any) -> None:
    try:
        (folder / RETURNED).write_bytes(packed(value))
    except Exception as error:
        raise RecipeError(
            f"launch: what {name} returned, {shown(value)}, cannot be handed back: {error}"
        ) from error


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
