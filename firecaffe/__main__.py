"""The program: `firecaffe`, or `python -m firecaffe`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` puts the current folder first, so that a random.py in it would be imported for the
    # library's. Code of one's own is found there all the same (`reference`).
    try:
        if sys.path[0] == os.getcwd():
            del sys.path[0]
    except FileNotFoundError:  # the folder is gone
        pass

from typing import NoReturn

from firecaffe.cli import main
from firecaffe.cluster.last_word import end_process

UTF8 = "PYTHONUTF8"


def _be_utf8() -> None:
    """Starts the program anew in Python's UTF-8 mode if the locale has another encoding, as C: the
    names of files, and what files hold, are UTF-8. What is printed keeps the locale's. Ranks are
    started in that mode.
    """
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get(UTF8) == "1":
        return
    environment = {"PYTHONIOENCODING": getattr(sys.stdout, "encoding", "ascii"), **os.environ}
    words = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, words, {**environment, UTF8: "1"})


def run() -> NoReturn:
    """Runs the command line; a rank then ends at once, which a script of one's own does not."""
    _be_utf8()
    # Else torch warns, a line each time, of hosts that no name server knows by their address. It
    # reads this as it is loaded, and errors are told by us.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    exit_code = main()
    if "RANK" in os.environ:
        end_process(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    run()
