"""The files of a Debian package, unpacked aside: nothing is installed, root's rights or not."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from firecaffe.data.command import run_command
from firecaffe.errors import DataError

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
    run_command(command, work, words)
