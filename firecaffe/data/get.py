"""Obtain Fashion-MNIST from wherever it can be had, and say what was tried.

Whatever the source, a file is accepted only if its uncompressed content has the known digest: the
published gzip files and Debian's differ, what is in them does not. A file is copied beside its
place and then renamed, so a file that is there is whole.

Source: https://github.com/zalandoresearch/fashion-mnist (address, md5), Debian's package
dataset-fashion-mnist 0.0~git20200523.55506a9-1 (sha256 of the contents).
"""

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from firecaffe.data.debian import fetch_package
from firecaffe.data.idx import read_idx_bytes
from firecaffe.errors import DataError


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: its name, dimensions, and digests."""

    name: str
    num_dims: int
    published_md5: str  # of the .gz file at OFFICIAL_URL
    content_sha256: str  # of the file that is in it


FILES = (
    IdxFile(
        "train-images-idx3-ubyte.gz",
        3,
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    IdxFile(
        "train-labels-idx1-ubyte.gz",
        1,
        "25c81989df183df01b3e8a0aad5dffbe",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte.gz",
        3,
        "bef4ecab320f06d8554ea6380940ec79",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte.gz",
        1,
        "bb300cfdad3c16e7a12a480ee83cd310",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
)
OFFICIAL_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_TIMEOUT_S = 5
_MAX_FILE_BYTES = 64 << 20


def get_fashion_mnist(destination: Path, report: Callable[[str], None]) -> Path:
    """Put the four files into `destination`; returns it.

    Tried in this order: what is there already, a Debian package on this machine, the official
    address, Debian's package. `report` is given a line for each thing tried and what came of it.

    Raises:
        DataError: none of them worked; the message lists what was tried.
    """
    if all(_is_right(destination / file.name, file) for file in FILES):
        report(f"{destination}: already there and complete")
        return destination
    tried = []
    with tempfile.TemporaryDirectory(prefix="firecaffe-get-") as work:
        for what, find in (
            (f"the folder {PACKAGE_FOLDER}", _installed_package),
            (f"the official address {OFFICIAL_URL}", _official),
            (f"Debian's package {PACKAGE}", _debian_package),
        ):
            report(f"trying {what}")
            try:
                _install(find(Path(work), report), destination)
            except DataError as error:
                report(f"  no: {error}")
                tried.append(f"{what} ({error})")
            else:
                report(f"  yes: four files checked and moved to {destination}")
                return destination
    raise DataError(
        f"fashion-mnist cannot be had; tried {'; '.join(tried)}. Where apt-get can fetch it, "
        f"`sudo apt-get install {PACKAGE}` puts it where it is looked for first"
    )


def _check(path: Path, file: IdxFile) -> None:
    content, _ = read_idx_bytes(path, file.num_dims)
    found = hashlib.sha256(content).hexdigest()
    if found != file.content_sha256:
        raise DataError(
            f"{path}: content has sha256 {found}, expected {file.content_sha256} of Fashion-MNIST"
        )


def _is_right(path: Path, file: IdxFile) -> bool:
    try:
        _check(path, file)
    except DataError:
        return False
    return True


def _install(source: Path, destination: Path) -> None:
    """Check all four files, then put each in its place in one motion."""
    for file in FILES:
        _check(source / file.name, file)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            aside = destination / f".{file.name}.{os.getpid()}"
            try:
                shutil.copyfile(source / file.name, aside)
                os.replace(aside, destination / file.name)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination}: cannot be written, {error.strerror}") from error


def _installed_package(work: Path, report: Callable[[str], None]) -> Path:
    if not PACKAGE_FOLDER.is_dir():
        raise DataError("there is no such folder")
    return PACKAGE_FOLDER


def _official(work: Path, report: Callable[[str], None]) -> Path:
    for file in FILES:
        try:
            with urllib.request.urlopen(OFFICIAL_URL + file.name, timeout=_TIMEOUT_S) as answer:
                content = answer.read(_MAX_FILE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(f"{file.name}: {error}") from error
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != file.published_md5:
            raise DataError(f"{file.name}: md5 is {found}, expected {file.published_md5}")
        (work / file.name).write_bytes(content)
    return work


def _debian_package(work: Path, report: Callable[[str], None]) -> Path:
    return fetch_package(PACKAGE, work, report) / PACKAGE_FOLDER.relative_to("/")
