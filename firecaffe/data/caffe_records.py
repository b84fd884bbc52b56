"""Labeled images as Caffe stores them: the Datums of an LMDB, and the lines of a list of files.

Encoded images are decoded blue first. JPEG decoders differ by a few units in some pixels; all other
arithmetic is OpenCV's, as in Caffe. Sources: BVLC/caffe, caffe.proto (Datum);
OpenCV, modules/imgproc/src/resize.cpp and color_rgb.cpp (fixed point of 11 and 14 bits).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from firecaffe.caffe.binary import BYTES, VARINT, Wire, signed
from firecaffe.caffe.message import CaffeError
from firecaffe.data.dataset import BrokenSampleError, reading, shape_text
from firecaffe.data.decode import JPEG, PILLOW_ERRORS, PNG, check_size, decode, open_image
from firecaffe.data.image_folder import read_image_file
from firecaffe.data.lmdb_file import LmdbFile
from firecaffe.errors import DataError
from firecaffe.files import read_bytes

Bytes = NDArray[np.uint8]
Pixels = Bytes | NDArray[np.float32]


@dataclass(frozen=True)
class CaffePaths:
    """Lookup of files that a prototxt names. `net` is the prototxt, `home` `data.path` or empty."""

    net: str
    home: str

    def of(self, name: str) -> list[str]:
        """Return the paths to try for a name, in order of preference."""
        name = os.path.expanduser(name)
        return list(dict.fromkeys([*self._at_home(name), *_joined(self._folders(), name)]))

    def _at_home(self, name: str) -> list[str]:
        last = os.path.basename(name.rstrip("/"))
        names = [last] if os.path.isabs(name) else [name, last]
        return _joined([self.home], *names) if self.home else []

    def find(self, what: str, name: str) -> Path:
        """Return the first path that exists. Raises DataError, which lists the paths tried."""
        places = self.of(name)
        for place in places:
            if os.path.exists(place):
                return Path(place)
        raise self._missing(what, name, places)

    def find_root(self, what: str, root_folder: str, file: str) -> str:
        """Return the prefix of a list's paths. Like Caffe, adds no slash after root_folder."""
        roots = self._roots(os.path.expanduser(root_folder))
        for root in roots:
            if os.path.isfile(root + file):
                return root
        raise self._missing(what, root_folder + file, [root + file for root in roots])

    def _roots(self, root_folder: str) -> list[str]:
        whole = [] if root_folder else [""]  # the list may have absolute paths
        names = [""] if os.path.isabs(root_folder) else [root_folder, ""]
        at_home = _joined([self.home], *names) if self.home else []
        return [*at_home, *whole, *_joined(self._folders(), root_folder)]

    def _folders(self) -> list[str]:
        folder = Path(os.path.abspath(self.net)).parent
        above = folder.parents[:-1]  # without the root folder
        return [os.getcwd(), *map(str, (folder, *above))]

    def _missing(self, what: str, name: str, places: list[str]) -> DataError:
        others = "nor in a folder above the latter"
        remedy = "set data.path to the folder that it is in now"
        if self.home:
            others, remedy = "nor where it is without data.path", "set data.path"
        looked, others = ", ".join(places[:2]), f", {others}" if places[2:] else ""
        return DataError(f'{what} "{name}" is not there: looked for {looked}{others}; {remedy}')


def _joined(folders: Iterable[str], *names: str) -> list[str]:
    return list(dict.fromkeys(os.path.join(folder, name) for folder in folders for name in names))


SHAPE, DATA, LABEL, FLOAT_DATA, ENCODED = (1, 2, 3), 4, 5, 6, 7
"""The numbers of a Datum's fields in caffe.proto."""


class Datum(NamedTuple):
    shape: tuple[int, ...]
    """Channels, rows and columns; 0 if not stated, as for most encoded images."""
    data: bytes
    floats: NDArray[np.float32]
    label: int
    encoded: bool


def parse_datum(value: bytes) -> Datum:
    """Parse a record of an LMDB. Raises CaffeError if it is no Datum."""
    wire, data, pieces = Wire(value, "no Datum"), b"", [np.empty(0, np.float32)]
    numbers: dict[int, int] = {}
    for part in wire.parts(0, len(value)):
        if part.kind == VARINT:
            numbers[part.number] = signed(part.value)
        elif part.number == DATA and part.kind == BYTES:
            data = wire.text(part)
        elif part.number == FLOAT_DATA and (piece := wire.fixed(part, 4)) is not None:
            pieces.append(piece)
    shape = tuple(numbers.get(number, 0) for number in SHAPE)
    label, encoded = numbers.get(LABEL, 0), bool(numbers.get(ENCODED))
    return Datum(shape, data, np.concatenate(pieces), label, encoded)


NATIVE, COLOR, GRAY = "native", "color", "gray"

GRAY_MODES = ("1", "L", "I", "I;16", "I;16B", "F")
ALPHA_MODES = ("LA", "PA", "RGBA", "La", "RGBa")


def decode_bgr(content: bytes, color: str) -> Bytes:
    """Decode to 1 or 3 x H x W, blue first. Raises BrokenSampleError, naming no file."""
    is_jpeg = content[:2] == JPEG
    is_gray = color == GRAY or (color == NATIVE and _is_gray(content, is_jpeg))
    if is_gray and is_jpeg:
        try:
            rows, columns, *_ = simplejpeg.decode_jpeg_header(content)
            check_size(rows, columns, len(content))
            # The Y channel of the file differs from a gray computed from RGB.
            luma_HW1: Bytes = simplejpeg.decode_jpeg(content, "GRAY")
            return luma_HW1.transpose(2, 0, 1)
        except ValueError:
            pass  # as in `decode`
    image_CHW: Bytes = decode(content).numpy()
    if not is_gray:
        return image_CHW[::-1]
    red, green, blue = image_CHW.astype(np.int32)
    if content[:8] == PNG:
        gray = (red * 9797 + green * 19234 + blue * 3737) >> 15
    else:
        gray = (red * 4899 + green * 9617 + blue * 1868 + 8192) >> 14
    return np.asarray(gray, np.uint8)[None]


def _is_gray(content: bytes, is_jpeg: bool) -> bool:
    try:
        if is_jpeg:
            return bool(simplejpeg.decode_jpeg_header(content)[2] == "Gray")
        with open_image(content) as image:
            mode = image.mode
    except PILLOW_ERRORS:
        return False  # `decode` says what is wrong
    if mode in ALPHA_MODES:
        raise BrokenSampleError(
            f"has an alpha channel (Pillow's mode {mode}); set force_color or force_gray"
        )
    return mode in GRAY_MODES


def resize(image_CHW: Bytes, rows: int, columns: int) -> Bytes:
    """Resize uint8 images as OpenCV does: bilinear, without antialiasing, in fixed point."""
    if image_CHW.shape[1:] == (rows, columns):
        return image_CHW
    top, bottom, of_top, of_bottom = _weights(image_CHW.shape[1], rows)
    left, right, of_left, of_right = _weights(image_CHW.shape[2], columns)

    def across(these_rows: NDArray[np.int64]) -> NDArray[np.int32]:
        lines = image_CHW[:, these_rows].astype(np.int32)
        return (lines[:, :, left] * of_left + lines[:, :, right] * of_right) >> 4

    upper = (across(top) * of_top[:, None]) >> 16
    lower = (across(bottom) * of_bottom[:, None]) >> 16
    return ((upper + lower + 2) >> 2).astype(np.uint8)


def _weights(
    size: int, new_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    # Each new pixel is the sum of two old ones, weighted in 2048ths.
    place = ((np.arange(new_size) + 0.5) * (1 / (new_size / size)) - 0.5).astype(np.float32)
    first = np.floor(place).astype(np.int64)
    share = place - first.astype(np.float32)
    weights = [np.rint(weight * np.float32(2048)).astype(np.int32) for weight in (1 - share, share)]
    # Places beyond an edge get the pixel of the edge.
    return first.clip(0, size - 1), (first + 1).clip(0, size - 1), weights[0], weights[1]


MAX_LIST_BYTES = 1 << 30


class Record(NamedTuple):
    image_CHW: Pixels
    label: int


class ImageRecords(Protocol):
    """Labeled images that several threads may read at once."""

    is_decoded: bool

    class_names: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, sample: int) -> Record:
        """Read a record. Raises DataError, or BrokenSampleError if it is damaged; both name it."""

    def name(self, sample: int) -> str: ...


class LmdbRecords:
    """The Datums of an LMDB in key order. Raises DataError if it is not an LMDB, or is empty."""

    class_names: tuple[str, ...] = ()

    def __init__(self, path: Path, color: str) -> None:
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

    def _datum(self, sample: int) -> Datum:
        try:
            return parse_datum(self._database.value(sample))
        except CaffeError as error:
            raise BrokenSampleError(f"{self.name(sample)}: is {error}") from error


def _raw(datum: Datum) -> Pixels:
    pixels: Pixels = np.frombuffer(datum.data, np.uint8)
    what = "bytes of pixels"
    if not datum.data and len(datum.floats):
        pixels, what = datum.floats, "numbers"
    expected = prod(datum.shape)
    if min(datum.shape) < 1 or pixels.size != expected:
        by = shape_text(datum.shape)
        raise BrokenSampleError(f"holds {pixels.size} {what} for {by}; expected {expected}")
    return pixels.reshape(datum.shape)


class ListedImages:
    """Images of a list of paths and labels. Raises DataError if the list is invalid or empty."""

    is_decoded = True

    def __init__(
        self,
        path: Path,
        root_folder: str,
        places: CaffePaths,
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
    # Folder names are class names only if classes 0 to n-1 have one folder each, all different.
    pairs = {
        (label, PurePosixPath(file).parent.name) for file, label in zip(files, labels, strict=True)
    }
    names = tuple(name for _, name in sorted(pairs))
    is_one_each = [label for label, _ in sorted(pairs)] == list(range(len(pairs)))
    return names if is_one_each and all(names) and len(set(names)) == len(names) > 1 else ()


def _of_several_labels(path: Path, file: str) -> DataError | None:
    numbers = file.split(" ")[1:]
    if not numbers or not all(number.lstrip("-").isdigit() for number in numbers):
        return None
    return DataError(
        f"{path}: has {len(numbers) + 1} labels for the first image; expected one (several of them "
        "go into an HDF5Data layer)"
    )


def read_lines(path: Path) -> list[str]:
    """Read the lines of a list that are not empty. Raises DataError if there are none."""
    try:
        with reading(path):
            text = read_bytes(path, MAX_LIST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no text; expected a list of files") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}; expected a list of files") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path}: names no files")
    return lines
