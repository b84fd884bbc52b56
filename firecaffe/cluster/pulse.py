"""A small process next to a rank that sends beats while the rank itself cannot.

A rank's watch is a thread, which waits for the interpreter's lock, and one call into C may hold
that for minutes. This process sends a fixed message over the same sockets, unless the kernel says
that the rank is stopped. So if a rank is silent, it or its host is stopped.

Before a message, the writer takes a lock on the socket, called the turn, and keeps it until the
kernel has accepted all bytes; otherwise messages would mix. The process runs this file alone, so
the file imports only a few modules of the standard library.
"""

import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence

ASK_TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
ASK_TO_SAVE = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send to a whole job; this process ignores them and ends with its rank."""

DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process; one that a debugger holds counts as running."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        # The state follows the name, which may hold any character (proc_pid_stat(5)).
        return file.read().rpartition(")")[2].split()[0] == "T"


def try_lock(descriptor: int) -> bool:
    """Take the turn to write to a socket, unless another process has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, ValueError):  # it is closed, and the next write will fail
        pass
    return True


def unlock(descriptor: int) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
    except (OSError, ValueError):
        return


def write(descriptor: int, left: bytes, message: bytes) -> bytes:
    """Write the rest of the last message, if any, else `message`; return the bytes not sent."""
    if not try_lock(descriptor):
        return left
    unsent = left or message
    try:
        unsent = unsent[os.write(descriptor, unsent) :]
    except OSError:  # it is gone, or has not read for long
        unsent = left
    if not unsent:
        unlock(descriptor)
    return unsent


def beat(process: int, beat_s: float, message: bytes, sockets: Sequence[int]) -> None:
    """Send beats for the process that has started this one, and end with it."""
    for number in (*ASK_TO_END, *ASK_TO_SAVE):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    left = dict.fromkeys(sockets, b"")
    while os.getppid() == process:
        if not is_stopped(process):
            for socket in sockets:
                left[socket] = write(socket, left[socket], message)
        time.sleep(beat_s)


if __name__ == "__main__":
    beat(
        int(sys.argv[1]), float(sys.argv[2]), bytes.fromhex(sys.argv[3]), [*map(int, sys.argv[4:])]
    )
