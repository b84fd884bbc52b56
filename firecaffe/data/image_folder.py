"""A folder of images with one folder per class, read on request."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from firecaffe.data.dataset import reading
from firecaffe.errors import DataError
from firecaffe.files import open_regular, read_bytes

MAX_BYTES = 2**31

HEAD_BYTES = 1 << 18
"""Bytes read from an image for its metadata alone."""

SIZE_SAMPLES = 64

NO_SUFFIX, FOLDER = "without a suffix", "folder"

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


OF_ARCHIVES = "__MACOSX"
"""A folder in archives made on a Mac. It repeats the name of every file."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is ignored everywhere, with its content."""
    return name.startswith(".") or name == OF_ARCHIVES


def listed(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not hidden, sorted by code point. Raises OSError."""
    return sorted(
        (entry for entry in os.scandir(folder) if not is_hidden(entry.name)),
        key=lambda entry: entry.name,
    )


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def class_names(folder: Path) -> list[str]:
    """Return the names of class folders, sorted by code point. Raises DataError if none exist."""
    try:
        names = [entry.name for entry in listed(folder) if entry.is_dir()]
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be read, {error.strerror}; "
            "expected a folder with one folder per class"
        ) from error
    if not names:
        raise DataError(f"{folder}: holds no folders, expected one folder per class")
    return names


class ImageFolder:
    """Images of `folder`/class/*, numbered by class, then file name. Raises DataError."""

    shard_counts: tuple[int, ...] = ()

    def __init__(self, folder: Path, classes: list[str]) -> None:
        labels = {name: label for label, name in enumerate(classes)}
        self.folder = folder
        self.unread: Counter[str] = Counter()
        """Counts of ignored files next to the images, by kind."""
        self.files: list[str] = []
        label_of_file: list[int] = []
        for name in class_names(folder):
            if name not in labels:
                raise DataError(
                    f"{folder / name}: class {name!r} is not among the {len(classes)} training "
                    "classes, expected the same folder names as in train"
                )
            with reading(folder / name):
                entries = listed(folder / name)
            files = [entry.name for entry in entries if is_image(entry.name)]
            unread = Counter(_kind(entry) for entry in entries if not is_image(entry.name))
            if not files:
                unread_kinds = f" ({_listed(unread)})" if unread else ""
                raise DataError(
                    f"{folder / name}: holds no images{unread_kinds}, expected files ending in "
                    f"{', '.join(SUFFIXES)}"
                )
            self.unread += unread
            self.files += [os.path.join(name, file) for file in files]
            label_of_file += [labels[name]] * len(files)
        self.labels_N = torch.tensor(label_of_file)
        self.num_classes = len(classes)
        self.class_names = tuple(classes)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, sample: int) -> str:
        return str(self.folder / self.files[sample])

    def labels(self, samples_B: Tensor) -> Tensor:
        return self.labels_N[samples_B]

    def size(self, sample: int) -> int:
        with reading(self.name(sample)):
            return os.stat(self.name(sample)).st_size

    def image_bytes(self) -> float:
        every = max(1, len(self) // SIZE_SAMPLES)
        sizes = [self.size(number) for number in range(0, len(self), every)]
        return sum(sizes) / len(sizes)

    def read(self, sample: int) -> bytes:
        return read_image_file(self.name(sample))

    def head(self, sample: int) -> bytes:
        path = self.name(sample)
        with reading(path), open_regular(path) as file:
            return file.read(HEAD_BYTES)


def read_image_file(path: str | Path) -> bytes:
    """Read a file. Raises DataError if it is missing, too long or not a regular file."""
    try:
        with reading(path):
            return read_bytes(path, MAX_BYTES)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _kind(entry: os.DirEntry[str]) -> str:
    return FOLDER if entry.is_dir() else kind_of(entry.name)


def kind_of(name: str) -> str:
    return os.path.splitext(name)[1].lower() or NO_SUFFIX


def notes_of(unread: Mapping[str, Counter[str]]) -> list[str]:
    return [
        f"{part}: {counts.total():,} files are left out ({_listed(counts)}); what is read ends in "
        f"{', '.join(SUFFIXES)}"
        for part, counts in unread.items()
        if counts
    ]


def _listed(counts: Counter[str]) -> str:
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {kind}" for kind, count in by_count)


TESTS = ("test", "val", "validation")
"""Folders besides train. The first that exists is the test set, the second the validation set."""


def open_folder(path: Path) -> list[ImageFolder]:
    """Open train and one or two of TESTS, with the classes of train. Raises DataError."""
    if path.is_dir() and not (path / "train").is_dir():
        raise DataError(
            f"{path}: holds no folder train; expected train and test, each with a folder per class "
            "(`firecaffe pack` takes a folder of classes alone, and holds test images out)"
        )
    classes = class_names(path / "train")
    tests = [path / name for name in TESTS if (path / name).is_dir()]
    if not tests:
        raise DataError(f"{path}: holds no folder test or val, expected one with the test images")
    return [ImageFolder(folder, classes) for folder in (path / "train", *tests[:2])]


def open_test_folder(path: Path) -> ImageFolder | None:
    """Open the test set, or return None if train exists. Raises DataError if neither exists."""
    if (path / "train").is_dir() or not path.is_dir():
        return None
    for name in TESTS:
        if (path / name).is_dir():
            return ImageFolder(path / name, class_names(path / name))
    raise DataError(f"{path}: holds no folder test or val; expected one, with a folder per class")
