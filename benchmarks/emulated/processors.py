"""A share of the processors for each emulated host, by the kernel's control groups.

Hosts of one machine share its processors, and one that waits leaves its time to the others: they
then compute faster than they did while all computed, which hosts of their own never would. With a
share, and no more than that, each computes at one pace. A whole number of processors is bound: the
host has these and no others, and never waits for the end of a period.

Both versions of the kernel's interface are here; only the first was at hand to be tried.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.emulated.namespaces import ClusterError, ClusterUnavailableError, is_left_over

VERSION_1 = Path("/sys/fs/cgroup/cpu")
VERSION_2 = Path("/sys/fs/cgroup")

MIN_US = 1000
"""Of a period, and of a group's time in it, by the kernel (min_cfs_quota_period)."""
LONGEST_US = 10_000
"""Of a period. A rank that has used its time up waits to the end of it, with its messages."""


def check_share(processors: float) -> None:
    """Raises: ClusterError for so many processors a host as the kernel cannot give."""
    least = MIN_US / LONGEST_US
    if not processors >= least:
        raise ClusterError(
            f"{processors:g} processors for each host; {least:g} is the least share that can be "
            "given (take fewer hosts, or no shares)"
        )


def quota_of(processors: float) -> tuple[int, int]:
    """Return microseconds of processor time, and the shortest period that has so many of them."""
    quota_us = max(MIN_US, round(processors * MIN_US))
    return quota_us, round(quota_us / processors)


def bound(processors: Sequence[float]) -> dict[int, set[int]]:
    """Return the processors of each host that has whole ones, as long as there are any."""
    free, by_host = sorted(os.sched_getaffinity(0)), dict[int, set[int]]()
    for host, own in enumerate(processors):
        if own == int(own) <= len(free):
            by_host[host], free = set(free[: int(own)]), free[int(own) :]
    return by_host


class Shares:
    """Control groups by name, each with so many processors (0.5: half of one) at most.

    Raises: ClusterUnavailableError where the kernel has no such groups, or none to give away.
    """

    def __init__(self, names: Sequence[str], processors: Sequence[float]) -> None:
        """processors: of each."""
        self._folders: list[Path] = []
        self._bound = bound(processors)
        try:
            parent = _parent()
            _remove_leftovers(parent)
            for host, (name, own) in enumerate(zip(names, processors, strict=True)):
                quota_us, period_us = quota_of(own)
                folder = parent / name
                folder.mkdir()
                self._folders.append(folder)
                if host in self._bound:
                    continue
                if parent == VERSION_1:
                    (folder / "cpu.cfs_period_us").write_text(str(period_us))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
                else:
                    (folder / "cpu.max").write_text(f"{quota_us} {period_us}")
        except OSError as error:
            self.remove()
            raise ClusterUnavailableError(f"processors cannot be shared out: {error}") from error

    def add(self, host: int, pid: int) -> None:
        """A process, and all that it will start."""
        with suppress(ProcessLookupError):  # it has ended already
            (self._folders[host] / "cgroup.procs").write_text(str(pid))
            if host in self._bound:
                os.sched_setaffinity(pid, self._bound[host])

    def remove(self) -> None:
        """Nothing may run in the groups any more."""
        for folder in self._folders:
            folder.rmdir()
        self._folders = []


def _parent() -> Path:
    if VERSION_1.resolve().is_mount():  # it may be a link to cpu,cpuacct
        return VERSION_1
    if "cpu" in (VERSION_2 / "cgroup.controllers").read_text().split():
        (VERSION_2 / "cgroup.subtree_control").write_text("+cpu")
        return VERSION_2
    raise FileNotFoundError(f"{VERSION_2} has no controller of processors")


def _remove_leftovers(parent: Path) -> None:
    for folder in parent.iterdir():
        if is_left_over(folder.name):
            with suppress(OSError):  # something runs there that nobody knows of
                os.rmdir(folder)
