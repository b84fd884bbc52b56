"""Images with labels, one by one: the records of an LMDB, and the lines of a list of files."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import numpy as np

from firecaffe.data.caffe_datum import check_protobuf, parse_datum
from firecaffe.data.caffe_decode import decode_bgr, resize
from firecaffe.data.caffe_paths import Places
from firecaffe.data.caffe_transform import Pixels
from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.folder import read_image_file
from firecaffe.data.lmdb_file import LmdbFile
from firecaffe.errors import DataError
from firecaffe.files import read_bytes

MOST_LIST_BYTES = 1 << 30


class Record(NamedTuple):
    image_CHW: Pixels
    label: int


class Records(Protocol):
    """What is asked by several threads at once."""

    is_decoded: bool
    """Whether its images have to be decoded."""

    class_names: tuple[str, ...]
    """By label; empty if nothing says them."""

    def __len__(self) -> int: ...

    def read(self, sample: int) -> Record:
        """Raises: DataError if it cannot be read, BrokenSampleError if it is damaged; both name
        it.
        """

    def name(self, sample: int) -> str:
        """For people."""


class LmdbRecords:
    """The Datums of an LMDB, in the order of their keys.

    Raises: DataError if this is no LMDB, or an empty one.
    """

    class_names: tuple[str, ...] = ()

    def __init__(self, path: Path, color: str) -> None:
        """color: a row of `caffe_decode`, for encoded images."""
        check_protobuf(path)
        self.path, self.color = path, color
        self._database = LmdbFile(path)
        if not len(self):
            raise DataError(f"{path}: holds no records")
        self.is_decoded = bool(self._datum(0).encoded)

    def __len__(self) -> int:
        return len(self._database)

    def name(self, sample: int) -> str:
        return f"{self.path}, key {self._database.key(sample).decode('ascii', 'backslashreplace')}"

    def read(self, sample: int) -> Record:
        datum = self._datum(sample)
        try:
            image_CHW = decode_bgr(datum.data, self.color) if datum.encoded else _raw(datum)
        except BrokenSampleError as error:
            raise BrokenSampleError(f"{self.name(sample)}: {error}") from error
        return Record(image_CHW, datum.label)

    def _datum(self, sample: int) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return parse_datum(self._database.value(sample))
        except DecodeError as error:
            raise BrokenSampleError(f"{self.name(sample)}: is no Datum, {error}") from error


def _raw(datum: Any) -> Pixels:
    """The pixels of a Datum that is not encoded: bytes, or numbers."""
    shape = (datum.channels, datum.height, datum.width)
    found: Pixels
    if datum.data or not len(datum.float_data):
        found, what = np.frombuffer(datum.data, np.uint8), "bytes of pixels"
    else:
        found, what = np.array(datum.float_data, np.float32), "numbers"
    expected = shape[0] * shape[1] * shape[2]
    if min(shape) < 1 or found.size != expected:
        by = " x ".join(map(str, shape))
        raise BrokenSampleError(f"holds {found.size} {what} for {by}; expected {expected}")
    return found.reshape(shape)


class ListedImages:
    """The images that a list names, each line a path and a label.

    Raises: DataError if the list cannot be read, a line is no path and label, or the first image is
    not there.
    """

    is_decoded = True

    def __init__(
        self,
        path: Path,
        root_folder: str,
        places: Places,
        new_HW: tuple[int, int] | None,
        color: str,
    ) -> None:
        self.new_HW, self.color = new_HW, color
        self.files: list[str] = []
        labels = []
        for number, line in enumerate(read_lines(path), 1):
            file, _, label = line.strip().rpartition(" ")
            try:
                labels.append(int(label))
                np.int64(labels[-1])  # it may be too large
            except (ValueError, OverflowError):
                raise DataError(
                    f"{path}:{number}: {line.strip()!r:.80}; expected a path, a space and a label, "
                    "which is a whole number, of 64 bits at most"
                ) from None
            self.files.append(file.strip())
        self.labels = np.array(labels, np.int64)
        self.class_names = _by_folder(self.files, labels)
        try:
            self.root = places.find_root(f"{path}: image", root_folder, self.files[0])
        except DataError as error:
            raise _of_several_labels(path, self.files[0]) or error from None

    def __len__(self) -> int:
        return len(self.files)

    def name(self, sample: int) -> str:
        return f"{self.root}{self.files[sample]}"

    def read(self, sample: int) -> Record:
        name = self.name(sample)
        try:
            image_CHW = decode_bgr(read_image_file(name), self.color)
        except BrokenSampleError as error:
            raise BrokenSampleError(f"{name}: {error}") from error
        if self.new_HW is not None:
            image_CHW = resize(image_CHW, *self.new_HW)
        return Record(image_CHW, int(self.labels[sample]))


def _by_folder(files: Sequence[str], labels: Sequence[int]) -> tuple[str, ...]:
    """The names of the folders, by label, if each class from 0 on has one of its own; else none."""
    pairs = {
        (label, PurePosixPath(file).parent.name) for file, label in zip(files, labels, strict=True)
    }
    names = tuple(name for _, name in sorted(pairs))
    is_one_each = [label for label, _ in sorted(pairs)] == list(range(len(pairs)))
    return names if is_one_each and all(names) and len(set(names)) == len(names) > 1 else ()


def _of_several_labels(path: Path, file: str) -> DataError | None:
    """What is wrong with a path that ends in numbers, as "photos/1.jpg 3 5"; None of others."""
    numbers = file.split(" ")[1:]
    if not numbers or not all(each.lstrip("-").isdigit() for each in numbers):
        return None
    return DataError(
        f"{path}: has {len(numbers) + 1} labels for the first image; expected one (several of them "
        "go into an HDF5Data layer)"
    )


def read_lines(path: Path) -> list[str]:
    """The lines of a list that are not empty; one at least. Raises: DataError."""
    try:
        text = read_bytes(path, MOST_LIST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no text; expected a list of files") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}; expected a list of files") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path}: names no files")
    return lines
