"""Signals that ask a process to stop: which it may hear, and that their handlers come back."""

import ctypes
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

SAME_S = 2.0
"""Seconds within which signals count as one: a scheduler signals the launcher and its ranks, and
the launcher its ranks too; a shell passes on the SIGHUP of its terminal, which sends another.
"""

ACTION_BYTES = 512
"""More than any system's struct sigaction, which is kept and given back unread."""


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those of the signals that this process may handle. A SIGHUP that was ignored when it started,
    as nohup has it, stays ignored; and a handler from before Python, of a program that embeds it,
    stays.
    """
    handlers = {number: signal.getsignal(number) for number in numbers}
    return [
        number
        for number, handler in handlers.items()
        if handler is not None and not (number == signal.SIGHUP and handler == signal.SIG_IGN)
    ]


@contextmanager
def handlers_kept(numbers: Iterable[signal.Signals]) -> Iterator[Sequence[signal.Signals]]:
    """Gives signals back to the handlers that they had before the block, those of C too, as
    `faulthandler.register` sets them. Yields the signals that the block may handle: in another
    thread than the main one, which alone may set a handler, none.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    found = heard(numbers)
    with ExitStack() as before:  # each comes back, also if a handler that is back raises
        for number in found:
            before.callback(_give_back, number, signal.getsignal(number), _action(number))
        yield found


def _give_back(number: signal.Signals, handler: Any, action: ctypes.Array[ctypes.c_char]) -> None:
    signal.signal(number, handler)  # what Python knows of it
    ctypes.CDLL(None).sigaction(int(number), action, None)


def _action(number: signal.Signals) -> ctypes.Array[ctypes.c_char]:
    """What the system does at a signal."""
    found = ctypes.create_string_buffer(ACTION_BYTES)
    ctypes.CDLL(None).sigaction(int(number), None, found)
    return found
