"""Requests to stop: a signal, or the launcher's end. Ranks agree on them at the end of a step."""

import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from firecaffe.cluster.handover import LAUNCHED
from firecaffe.cluster.process_settings import SAME_S, handlers_kept
from firecaffe.errors import FirecaffeError, LauncherLostError, PreemptedError
from firecaffe.resume_advice import resume_word

# Sent by schedulers before they take the machine, by Ctrl-C, and by a terminal that is closed. A
# second one, `SAME_S` seconds later or more, ends the process at once. Without a launcher a second
# Ctrl-C always does, because a person presses it.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

CTRL_C = b"\nfirecaffe: stops after this step, with a checkpoint; Ctrl-C again ends it at once\n"

LAUNCHER = "its launcher is gone"


class StopRequest:
    """Listens for requests to stop in a `with` block. Signals need the main thread."""

    def __init__(self) -> None:
        self._asked = ""
        self._kept = ExitStack()
        self._heard_s = 0.0
        # Our own launcher passes its process id, because it may be gone already.
        self._parent: int | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._parent = int(os.environ.get(LAUNCHED, os.getppid()))

    @property
    def reason(self) -> str:
        """The reason why this rank is to stop; empty if it is not."""
        if not self._asked and self._parent is not None and os.getppid() != self._parent:
            self._asked = LAUNCHER
        return self._asked

    def _hear(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        is_person = number == signal.SIGINT and "RANK" not in os.environ
        if self._asked and (is_person or now - self._heard_s > SAME_S):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self._asked:
            self._asked, self._heard_s = signal.Signals(number).name, now
            if is_person:
                with suppress(OSError):
                    os.write(2, CTRL_C)  # not by print, which the signal may interrupt

    def __enter__(self) -> Self:
        for number in self._kept.enter_context(handlers_kept(SIGNALS)):
            signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()


def stopped(reason: str, done: int, folder: Path) -> FirecaffeError:
    """Return the error that ends a run that was asked to stop after `done` steps."""
    message = (
        f"stopped after step {done} ({reason or 'another rank was asked to'}); "
        f"a checkpoint is saved, resume with {resume_word(folder)}"
    )
    if reason == LAUNCHER:
        return LauncherLostError(message)
    error = PreemptedError(message)
    error.goes_along = not reason
    return error
