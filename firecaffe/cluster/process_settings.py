"""Settings of this process: signals that ask it to stop, variables, malloc, and Gloo's threads.

By default glibc maps every large allocation anew and gives it back when freed, so each training
step on a CPU page-faults through all of its activations again. Measured with DDP on NiN, batches of
64 on each worker: 95 images/s against 135 (benchmarks/results/training.md).
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from firecaffe.cluster.pulse import DIE_WITH_PARENT
from firecaffe.errors import RecipeError

# A scheduler signals the launcher and its ranks, and the launcher signals its ranks, too. A shell
# passes on the SIGHUP of its terminal, and the terminal sends another.
SAME_S = 2.0
"""Seconds within which signals count as one: launchers and shells pass them on."""

ENDS_WITH = "FIRECAFFE_ENDS_WITH"
"""A variable for a new process: the parent, if the process is to end with it."""

ACTION_BYTES = 512
"""More bytes than any system's struct sigaction, which is saved and restored as it is."""


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals, out of `numbers`, that this process may handle."""
    # A SIGHUP that was ignored at the start (nohup) stays ignored. A handler of C code, in a
    # program that embeds Python, stays, too.
    handlers = {number: signal.getsignal(number) for number in numbers}
    return [
        number
        for number, handler in handlers.items()
        if handler is not None and not (number == signal.SIGHUP and handler == signal.SIG_IGN)
    ]


@contextmanager
def handlers_kept(numbers: Iterable[signal.Signals]) -> Iterator[Sequence[signal.Signals]]:
    """Restore the signals' handlers after the block; yield those that the block may handle."""
    if threading.current_thread() is not threading.main_thread():
        yield []  # only the main thread may set a handler
        return
    handled = heard(numbers)
    with ExitStack() as before:  # each is restored, even if a restored handler raises
        for number in handled:
            before.callback(_give_back, number, signal.getsignal(number), _action(number))
        yield handled


def _give_back(number: signal.Signals, handler: Any, action: ctypes.Array[ctypes.c_char]) -> None:
    signal.signal(number, handler)  # Python's own record of the handler
    ctypes.CDLL(None).sigaction(int(number), action, None)


def _action(number: signal.Signals) -> ctypes.Array[ctypes.c_char]:
    # Python does not know handlers of C code, which `faulthandler.register` sets.
    action = ctypes.create_string_buffer(ACTION_BYTES)
    ctypes.CDLL(None).sigaction(int(number), None, action)
    return action


def end_with_parent() -> None:
    """Ask for SIGTERM when the parent ends, even by SIGKILL, if the parent wants that; on Linux.

    The kernel counts the end of the thread that has started this process.
    """
    parent = os.environ.pop(ENDS_WITH, "")  # ranks of this process have another parent
    if parent and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGTERM)
        if parent != str(os.getppid()):  # it has ended before the call
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """Restore environment variables after the block, whether it returns or raises."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_TURN = threading.RLock()


@contextmanager
def exclusive_in_process(what: str) -> Iterator[None]:
    """Let one thread at a time into blocks that change what all threads share; it may enter again.

    what: the call's name, for the message. Raises: RecipeError if another thread is in such a
    block.
    """
    if not _TURN.acquire(blocking=False):
        raise RecipeError(
            f"{what}: another thread of this process trains, evaluates or launches already, and "
            "they would share random generators and variables; wait for it, or start this in "
            "another process"
        )
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def non_preempting_threads() -> Iterator[None]:
    """Let threads that start in the block, such as Gloo's, preempt no other thread.

    Gloo's thread spins on a lock. If it has preempted the sender that holds it, on the same core,
    it spins until its time slice ends: a sum of 4 KB over a ring then takes 5 ms, not 0.2.
    """
    # On Linux, 0 is this thread, and a new thread inherits its starter's policy.
    with ExitStack() as after:
        if sys.platform.startswith("linux") and os.sched_getscheduler(0) == os.SCHED_OTHER:
            with suppress(OSError):  # a container may forbid it; then sums are only slower
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                after.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        yield


@contextmanager
def compute_threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Source: glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = 2**31 - 1


def keep_freed_memory() -> bool:
    """Serve large blocks from the heap and never shrink it. Return False without glibc."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))


def give_back_freed_memory() -> None:
    """Return the pages of all free memory to the system."""
    # Small blocks soon take a part of a large block that was freed. The next large block then goes
    # elsewhere, and both count as used.
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _glibc(name: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL("libc.so.6"), name)
    except (OSError, AttributeError):
        return None


def oom_kill_count() -> int:
    """Return how many processes this host's kernel has killed for lack of memory."""
    try:
        fields = Path("/proc/vmstat").read_text(encoding="utf-8").split()
        return int(fields[fields.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0
