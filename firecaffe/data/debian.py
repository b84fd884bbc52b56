"""The files of a Debian package, unpacked aside: nothing is installed, root's rights or not."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from firecaffe.errors import DataError

_COMMAND_TIMEOUT_S = 300
_NETWORK = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10")
_SANDBOX = ("-o", "APT::Sandbox::User=root")
"""Options with which root's apt does not download as another user, who may not write into our
folder.
"""


def fetch_package(package: str, work: Path, report: Callable[[str], None]) -> Path:
    """Downloads the package and unpacks it in `work`.

    Returns the folder that it was unpacked in, which stands for `/`. `report` is given a line for
    what did not work.

    Raises:
        DataError: apt-get or dpkg is not on this machine, or the package cannot be had.
    """
    for command in ("apt-get", "dpkg"):
        if shutil.which(command) is None:
            raise DataError(f"there is no {command} on this machine")
    archive = _download(package, work, report)
    unpacked = work / "unpacked"
    _run(["dpkg", "-x", str(archive), str(unpacked)], work)
    return unpacked


def _download(package: str, work: Path, report: Callable[[str], None]) -> Path:
    try:
        _run(["apt-get", *_NETWORK, *_SANDBOX, "download", package], work)
    except DataError as error:
        report(f"  {error}; again with fresh package lists")
        # Lists of our own: the machine's may be missing or old, and only root may renew them.
        (work / "lists" / "partial").mkdir(parents=True)
        (work / "cache" / "archives" / "partial").mkdir(parents=True)
        own = ("-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache")
        _run(["apt-get", *_NETWORK, *_SANDBOX, *own, "update"], work)
        _run(["apt-get", *_NETWORK, *_SANDBOX, *own, "download", package], work)
    archives = list(work.glob(f"{package}_*.deb"))
    if len(archives) != 1:
        raise DataError(f"apt-get download {package} left {len(archives)} packages, expected one")
    return archives[0]


def _run(command: Sequence[str], work: Path) -> None:
    words = " ".join(word for word in command if word != "-o" and "::" not in word)
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{words} took more than {_COMMAND_TIMEOUT_S} s") from None
    except OSError as error:
        raise DataError(f"{words}: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DataError(f"{words} ended with {done.returncode}: {last}")
