"""Signals that ask a process to stop: which it may handle, and how handlers are restored."""

import ctypes
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

# A scheduler signals the launcher and its ranks, and the launcher its ranks too. A shell passes on
# the SIGHUP of its terminal, which sends another.
SAME_S = 2.0
"""Seconds within which signals count as one: launchers and shells pass them on."""

ACTION_BYTES = 512
"""More than any system's struct sigaction, which is saved and restored unread."""


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of the signals that this process may handle."""
    # A SIGHUP that was ignored at the start, as by nohup, stays ignored. A handler from before
    # Python, of a program that embeds it, stays, too.
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
    signal.signal(number, handler)  # what Python knows of it
    ctypes.CDLL(None).sigaction(int(number), action, None)


def _action(number: signal.Signals) -> ctypes.Array[ctypes.c_char]:
    # Python does not know those of C, which `faulthandler.register` sets.
    action = ctypes.create_string_buffer(ACTION_BYTES)
    ctypes.CDLL(None).sigaction(int(number), None, action)
    return action
