"""A rank of this host, as the process that its launcher has started for it."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from firecaffe.cluster.descriptors import wait_for_room
from firecaffe.cluster.last_word import REPORT
from firecaffe.cluster.lost_ranks import Seen

KILLED_S = 30.0
"""Seconds for a process that was killed to be gone; one that hangs in the kernel is left."""


@dataclass(frozen=True)
class RankProcess:
    """A process in a session of its own, and the file in which it leaves its last word."""

    local_rank: int
    process: subprocess.Popen[bytes]
    report: Path

    @classmethod
    def start(
        cls, local_rank: int, command: Sequence[str], words: Mapping[str, str], report: Path
    ) -> Self:
        """words: of its environment, beside those of this process. Raises: OSError."""
        report.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **words, REPORT: str(report)}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        return cls(local_rank, process, report)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone: one that is on its way out runs."""
        return self.process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped, and hears no signal but SIGKILL."""
        if self.has_ended:
            return False
        wait_for_room(1)
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def failure(self) -> ProcessFailure | None:
        """How it has ended; None if it has not, or with code 0."""
        code = self.process.poll()
        if not code:
            return None
        return ProcessFailure(self.local_rank, self.process.pid, code, str(self.report))

    def seen(self) -> Seen:
        """The process at one moment: what ends after it was looked at runs."""
        has_ended = self.has_ended
        return Seen(has_ended, self.is_stopped, self.failure if has_ended else None)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it has not ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it without its help."""
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)
