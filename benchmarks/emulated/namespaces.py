"""Network namespaces by name: what they need, how they are entered, how they go and leave nothing.

A name begins with the number and the start of the process that owns it, so that whoever finds it
can tell whether the owner still lives.
"""

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FOLDER = Path("/var/run/netns")
"""Where `ip netns` keeps the names."""

NAME = re.compile(r"fc(?P<pid>\d+)-(?P<started>\d+)-\d+-\w+")
REFUSALS = ("Operation not permitted", "qdisc kind is unknown", "Unknown device type")
IP_BATCH = ("ip", "-force", "-batch", "-")
CLONE_NEWNET = 0x40000000
MAX_AT_ONCE = 8
MAX_ROUNDS = 1000

_numbers = itertools.count()


class ClusterError(Exception):
    """The cluster could not be made, changed or taken down."""


class ClusterUnavailableError(ClusterError):
    """No cluster can be emulated here: no root, a command is missing, or the kernel refuses."""


def new_prefix() -> str:
    """What the names of one cluster begin with: no other cluster's names do."""
    return f"fc{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"


def require() -> None:
    """Raises: ClusterUnavailableError with what is missing here."""
    if not sys.platform.startswith("linux"):
        raise ClusterUnavailableError(f"an emulated cluster needs Linux; this is {sys.platform}")
    if os.geteuid() != 0:
        raise ClusterUnavailableError(f"an emulated cluster needs root; this is uid {os.geteuid()}")
    for command in ("ip", "tc", "setpriv"):
        if shutil.which(command) is None:
            raise ClusterUnavailableError(f"an emulated cluster needs {command}; it is not in PATH")


def execute(*work: tuple[Sequence[str], Sequence[str]]) -> None:
    """Runs commands at once, each with the lines that it reads.

    Raises: ClusterUnavailableError where the kernel lacks or refuses something, else ClusterError.
    """
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        for error in pool.map(_error_of, work):
            if any(words in error for words in REFUSALS):
                raise ClusterUnavailableError(error)
            if error:
                raise ClusterError(error)


def _error_of(work: tuple[Sequence[str], Sequence[str]]) -> str:
    command, lines = work
    # In a group of its own: Ctrl-C is for this process, which then takes the cluster down.
    done = subprocess.run(
        command,
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        process_group=0,
        check=False,
    )
    said = " ".join((done.stderr or done.stdout).split())
    return f"{' '.join(command)}: {said}" if done.returncode else ""


def inside(namespace: str, function: Callable[[], T]) -> T:
    """Calls a function in a namespace: what it opens stays there. Costs 0.1 ms, and no process.

    Only in a thread that ends with it, as the rest of this process has its own network to keep.
    /proc/thread-self is what the namespace shows; /proc/self is still this process's.
    """

    def enter_and_call() -> T:
        enter(namespace)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_call).result()


def enter(namespace: str) -> None:
    """Takes this thread into a namespace. Raises: OSError."""
    with open(FOLDER / namespace) as file:
        # os.setns is of Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}", namespace)


def remove_leftovers() -> None:
    """Removes the clusters of processes that no longer live, and what still runs in them."""
    names = [path.name for path in FOLDER.iterdir()] if FOLDER.exists() else []
    remove(name for name in names if is_left_over(name))


def is_left_over(name: str) -> bool:
    """Whether a name is one of a cluster whose owner no longer lives."""
    match = NAME.fullmatch(name)
    return match is not None and _start_of(int(match["pid"])) != int(match["started"])


def remove(names: Iterable[str]) -> None:
    """Kills all that runs in these namespaces, then removes those that there are.

    Raises: ClusterError where one is left.
    """
    found = [name for name in names if (FOLDER / name).exists()]
    for _ in range(MAX_ROUNDS):
        processes = _processes_in(found)
        if not processes:
            break
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    if found:
        # By force: one that another cluster's start has removed just now is no reason to stop.
        error = _error_of((IP_BATCH, [f"netns delete {name}" for name in found]))
        if left := [name for name in found if (FOLDER / name).exists()]:
            raise ClusterError(f"namespaces {left} are left: {error}")


def _processes_in(names: Iterable[str]) -> list[int]:
    """The processes in these namespaces, whichever group or session they have moved to."""
    networks = set()
    for name in names:
        with suppress(OSError):
            networks.add(_identity(FOLDER / name))
    processes = []
    for path in Path("/proc").glob("[0-9]*/ns/net") if networks else ():
        with suppress(OSError):  # it has ended since it was listed
            if _identity(path) in networks:
                processes.append(int(path.parts[2]))
    return processes


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _start_of(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None where no such process lives."""
    try:
        # The second field is a name in brackets, with anything in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
