"""Ranks as processes in network namespaces: started, awaited, killed.

The way in is `VirtualCluster.run` and `VirtualCluster.start` of `virtual_cluster`.
"""

import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from firecaffe.cluster.secret import SECRET

MAX_STDERR_LINES = 20

_secret = secrets.token_hex(16)
"""Of all runs that this process starts on several hosts."""


class RunError(Exception):
    """A run that did not come to its end; `rank` is the rank to look at."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailedError(RunError):
    """A rank was killed, or ended with an exit code other than 0."""


class RunTimeoutError(RunError):
    """Ranks still ran when the time was over; `rank` is the lowest of them."""


class Rank:
    """A process, leader of a process group of its own, with what it has written so far.

    It dies with the thread that started it. `live` lets it write to this process's stdout.
    """

    def __init__(
        self,
        rank: int,
        namespace: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        live: bool = False,
    ) -> None:
        self.rank = rank
        # Files (in memory), not pipes: no rank ever waits until somebody reads what it says.
        self._files = os.memfd_create("stdout"), os.memfd_create("stderr")
        self._written: tuple[str, str] | None = None
        # setpriv and ip replace themselves by the command, so this is one process with one number.
        inside = ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *command)
        try:
            self._process = subprocess.Popen(
                inside,
                env={SECRET: _secret, **os.environ, **environment, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=None if live else self._files[0],
                stderr=self._files[1],
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative is the signal that killed it; None until `wait` or `end` has returned."""
        return self._process.returncode

    @property
    def stdout(self) -> str:
        return self._read()[0]

    @property
    def stderr(self) -> str:
        return self._read()[1]

    def send_signal(self, number: int = signal.SIGKILL) -> None:
        """To all processes of the rank's group, unless the rank was waited for already."""
        if self.exit_code is None:
            os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> int:
        """The exit code, when the rank has ended. Kills what it left of its group.

        Raises: RunTimeoutError; the rank goes on.
        """
        if not first_to_end([self], timeout_s):
            raise RunTimeoutError(self.rank, f"rank {self.rank} still runs after {timeout_s:g} s")
        return self.end()

    def wait_for_line(self, line: str, timeout_s: float) -> None:
        """Returns when the rank has printed this line.

        Raises: RankFailedError where it ended and never did; RunTimeoutError.
        """
        deadline = time.monotonic() + timeout_s
        ended = False
        while line not in self.stdout.splitlines():
            if ended:
                raise RankFailedError(self.rank, f"never printed {line!r}: {fate(self)}")
            if time.monotonic() > deadline:
                raise RunTimeoutError(
                    self.rank, f"rank {self.rank} has not printed {line!r} in {timeout_s:g} s"
                )
            ended = bool(first_to_end([self], 0.01))

    def end(self) -> int:
        """Kills what still runs of the rank's group. Returns the exit code."""
        if self.exit_code is None:
            # Before the leader is reaped, as until then no other group can have its number.
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._written = self._read()
            self._close()
            os.close(self._pidfd)
        assert self.exit_code is not None
        return self.exit_code

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._pidfd

    def _read(self) -> tuple[str, str]:
        if self._written is not None:
            return self._written
        stdout, stderr = (
            # Not read(), which would move the place where the rank writes on.
            os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
            for file in self._files
        )
        return stdout, stderr

    def _close(self) -> None:
        for file in self._files:
            os.close(file)


def start_ranks(
    namespaces: Sequence[str],
    command: Sequence[str],
    ranks_per_host: int,
    environment: Mapping[str, str],
    live: bool,
) -> list[Rank]:
    """One process for each rank with torchrun's environment, host by host.

    `live` lets rank 0 write to this process's stdout. `environment` goes before all but the rank.
    """
    ranks: list[Rank] = []
    try:
        for host, namespace in enumerate(namespaces):
            for local_rank in range(ranks_per_host):
                whole = {
                    "WORLD_SIZE": str(len(namespaces) * ranks_per_host),
                    "LOCAL_WORLD_SIZE": str(ranks_per_host),
                    "LOCAL_RANK": str(local_rank),
                    "GROUP_RANK": str(host),
                    "NODE_RANK": str(host),
                    "OMP_NUM_THREADS": "1",
                    # What a killed rank had printed is there to be read.
                    "PYTHONUNBUFFERED": "1",
                    **environment,
                }
                is_live = live and not ranks
                ranks.append(Rank(len(ranks), namespace, command, whole, is_live))
    except BaseException:
        for rank in ranks:
            rank.end()
        raise
    return ranks


def wait_for_ranks(ranks: Sequence[Rank], timeout_s: float) -> str:
    """What rank 0 printed, when all have ended with exit code 0.

    Raises: RankFailedError for the first that did not; RunTimeoutError. No rank is left running.
    """
    deadline = time.monotonic() + timeout_s
    try:
        running = list(ranks)
        while running:
            ended = first_to_end(running, deadline - time.monotonic())
            if not ended:
                names = ", ".join(str(rank.rank) for rank in running)
                raise RunTimeoutError(
                    running[0].rank,
                    f"rank(s) {names} of {len(ranks)} still ran after {timeout_s:g} s"
                    + _last_lines(running[0]),
                )
            # A signal is negative and comes first: who was killed explains who then lost its peer.
            worst = min(ended, key=lambda rank: (rank.end() == 0, rank.end()))
            if worst.end():
                raise RankFailedError(worst.rank, fate(worst))
            running = [rank for rank in running if rank not in ended]
    finally:
        for rank in ranks:
            rank.end()
    return ranks[0].stdout


def first_to_end(ranks: Sequence[Rank], timeout_s: float) -> list[Rank]:
    """Those that have ended, when there is one; none when the time is over before.

    The kernel tells; asking each rank in turns would take time from what is measured.
    """
    ended = [rank for rank in ranks if rank.exit_code is not None]
    if ended:
        return ended
    by_descriptor = {rank.fileno(): rank for rank in ranks}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[number] for number, _ in poll.poll(max(0.0, timeout_s) * 1000)]


def fate(rank: Rank) -> str:
    """How a rank ended, and the end of what it said."""
    code = rank.end()
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
    return f"rank {rank.rank} {how}{_last_lines(rank)}"


def _last_lines(rank: Rank) -> str:
    lines = rank.stderr.splitlines()[-MAX_STDERR_LINES:]
    if not lines:
        return "; it wrote nothing to stderr"
    return "\n".join([f"; rank {rank.rank}'s stderr ends:", *lines])
