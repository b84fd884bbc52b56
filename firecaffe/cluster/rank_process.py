"""A rank of this host, as a process of its launcher, and the file descriptors that it keeps free.

torch's store accepts every connection and waits forever for its first bytes. Each connection takes
a file descriptor of the launcher, which needs some to look after its ranks. So a connection without
any bytes is shut down: torch's own client sends its first bytes as soon as it is connected.
"""

import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from firecaffe.cluster.handover import REPORT
from firecaffe.cluster.secret import PROVE_S
from firecaffe.errors import PreemptedError
from firecaffe.faults import ANOTHER, Fault

POLL_S = 1.0
CROWDED_S = 0.05
"""Seconds between two checks, and for a caller's first bytes, if few descriptors are left."""

LEFT = 64
"""Number of free descriptors below which they count as few."""

NEEDED = 16
"""Most descriptors that a launcher needs to look after its ranks, not counting their start."""

MOST = 1 << 16
"""Most descriptors that are asked for; a container's limit may be 2^30."""

PATIENCE_S = 60.0

BYTES_RECEIVED = struct.Struct("=128xQ")
"""The offset of tcpi_bytes_received in Linux's tcp_info."""


@contextmanager
def descriptors_kept(port: int) -> Iterator[None]:
    """Shut down silent connections to this process's store at `port`; allow more descriptors."""
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    is_over = threading.Event()
    if sys.platform.startswith("linux"):
        threading.Thread(target=_keep, args=(port, is_over), name="room", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def wait_for_descriptors(count: int = NEEDED) -> None:
    """Wait until `count` more descriptors can be opened, for at most `PATIENCE_S` seconds."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        taken: list[int] = []
        try:
            taken += (os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(count))
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        finally:
            for descriptor in taken:
                os.close(descriptor)
        time.sleep(CROWDED_S)


def _keep(port: int, is_over: threading.Event) -> None:
    silent_since: dict[tuple[int, str], float] = {}
    wait_s = POLL_S
    spare = _spare()  # a reserve for the copy in `_cut_off`
    while not is_over.wait(wait_s):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = MOST if limit == resource.RLIM_INFINITY else limit
        descriptors = _descriptors(limit)
        wait_s = CROWDED_S if limit - len(descriptors) < LEFT else POLL_S
        patience_s = PROVE_S if wait_s == POLL_S else CROWDED_S
        now, before, silent_since = time.monotonic(), silent_since, {}
        for descriptor in descriptors:
            caller = _silent_caller(descriptor, port)
            if caller is None:
                continue
            since_s = silent_since[descriptor, caller] = before.get((descriptor, caller), now)
            if now - since_s >= patience_s:
                os.close(spare)
                _cut_off(descriptor, caller, port)
                spare = _spare()
    os.close(spare)


def _descriptors(limit: int) -> Sequence[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(limit)  # no descriptor is left to list the folder


def _silent_caller(descriptor: int, port: int) -> str | None:
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or connection.getsockname()[1] != port
        ):
            return None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED.size)
        return None if BYTES_RECEIVED.unpack(info)[0] else str(connection.getpeername())
    except (OSError, struct.error):  # a listening socket has no peer
        return None
    finally:
        connection.detach()


def _cut_off(descriptor: int, caller: str, port: int) -> None:
    # A duplicate stays the same socket even if the store closes its own and reuses the number.
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if _silent_caller(copy.fileno(), port) == caller:
            copy.shutdown(socket.SHUT_RDWR)


def _spare() -> int:
    while True:
        try:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            time.sleep(CROWDED_S)


KILLED_S = 30.0
"""Seconds for a killed process to be gone; one that hangs in the kernel is left behind."""


class RankFailure(ProcessFailure):
    """The end of a rank's process with another code than 0, and what it reported, if it did."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        message = self.error_file_data["message"]
        self.has_reported = isinstance(message, dict)  # by `leave_report`
        report = message if self.has_reported else {}
        facts = report.get("extraInfo", {})
        self.line = str(report.get("message", f"ended with code {self.exitcode}"))
        self.fault = Fault.parse(facts["fault"]) if "fault" in facts else None
        self.traceback = str(facts.get("traceback", ""))
        self.time_s = float(facts.get("time_s", self.timestamp))

    @property
    def has_trained(self) -> bool:
        return self.fault is not None and self.fault.step > 0

    @property
    def is_asked_elsewhere(self) -> bool:
        """Whether the rank stopped because a rank of another host was asked to."""
        is_asked = self.exitcode == PreemptedError.exit_code
        return is_asked and self.fault is not None and self.fault.seen == ANOTHER

    def is_for_another(self, rank: int) -> bool:
        """Whether this rank, `rank`, only ended because it had lost another one."""
        fault = self.fault
        return fault is not None and (fault.rank != rank or fault.seen == ANOTHER)


@dataclass(frozen=True)
class ProcessState:
    has_ended: bool
    is_stopped: bool
    failure: RankFailure | None = None
    """How it ended, if not with code 0."""


@dataclass(frozen=True)
class RankProcess:
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
        """Whether the process is gone; a process that is just ending still runs."""
        return self.process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped, and reacts to no signal but SIGKILL."""
        if self.has_ended:
            return False
        wait_for_descriptors(1)
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        return False

    @property
    def failure(self) -> RankFailure | None:
        """How it ended; None if it has not, or with code 0."""
        code = self.process.poll()
        if not code:
            return None
        return RankFailure(self.local_rank, self.process.pid, code, str(self.report))

    def seen(self) -> ProcessState:
        """Return the process's state; if it ends during the call, it still counts as running."""
        has_ended = self.has_ended
        return ProcessState(has_ended, self.is_stopped, self.failure if has_ended else None)

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILLED_S)
