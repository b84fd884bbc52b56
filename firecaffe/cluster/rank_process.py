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
"""Seconds for a killed process to be gone; one that hangs in the kernel is left behind."""


@dataclass(frozen=True)
class RankProcess:
    """A process in its own session, and the file with its last word."""

    local_rank: int
    process: subprocess.Popen[bytes]
    report: Path

    @classmethod
    def start(
        cls, local_rank: int, command: Sequence[str], words: Mapping[str, str], report: Path
    ) -> Self:
        """Start a process, with `words` added to this one's environment. Raises: OSError."""
        report.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **words, REPORT: str(report)}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        return cls(local_rank, process, report)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; one that is just ending still runs."""
        return self.process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped, and reacts to no signal but SIGKILL."""
        if self.has_ended:
            return False
        wait_for_room(1)
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def failure(self) -> ProcessFailure | None:
        """How it ended; None if it has not, or with code 0."""
        code = self.process.poll()
        if not code:
            return None
        return ProcessFailure(self.local_rank, self.process.pid, code, str(self.report))

    def seen(self) -> Seen:
        """Return the process at one moment; one that ends during the look still runs."""
        has_ended = self.has_ended
        return Seen(has_ended, self.is_stopped, self.failure if has_ended else None)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)
