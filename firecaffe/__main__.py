"""The program: `firecaffe`, or `python -m firecaffe`."""

import gc
import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first, so a random.py in it would hide the library's.
    # User code in that folder is still found (`user_code`).
    try:
        if sys.path[0] == os.getcwd():
            del sys.path[0]
    except FileNotFoundError:  # the folder is gone
        pass

from typing import NoReturn

from firecaffe import why_not

if problem := why_not():  # the modules below need Unix
    print(f"firecaffe: {problem}", file=sys.stderr)
    sys.exit(2)

from firecaffe.cli import main
from firecaffe.cluster.handover import end_process

UTF8 = "PYTHONUTF8"


def _be_utf8() -> None:
    """Restart the program in UTF-8 mode, for names and contents of files, if the locale differs."""
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(UTF8) == "1":
        return
    # Printed text keeps the locale's encoding. Ranks inherit the mode.
    environment = {"PYTHONIOENCODING": getattr(sys.stdout, "encoding", "ascii"), **os.environ}
    arguments = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, arguments, {**environment, UTF8: "1"})


def _look_for_garbage() -> None:
    gc.freeze()
    gc.enable()


def run() -> NoReturn:
    """Run the command line and end the process: a rank at once, without waiting for its threads."""
    _be_utf8()
    # Without this, torch prints a warning for each host whose address has no name. torch reads the
    # variable when it is loaded. firecaffe reports errors itself.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # While modules load, collections would find no garbage, and take a sixth of the start's time.
    gc.disable()
    exit_code = main(loaded=_look_for_garbage)
    if "RANK" in os.environ:
        end_process(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    run()
