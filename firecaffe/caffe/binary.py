"""Protobuf's binary format without a schema, and Caffe's blobs, means and solver states in it.

Nothing is copied: a field refers to its place in the file. The number of fields read and the
nesting of groups are bounded. Sources: "Encoding", protobuf.dev/programming-guides/encoding;
BVLC/caffe, src/caffe/blob.cpp; field numbers of a real Caffe.
"""

import mmap
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import decoded

VARINT, FIXED64, BYTES, GROUP, END_OF_GROUP, FIXED32 = range(6)
WIDTHS = {FIXED64: 8, FIXED32: 4}
MAX_FIELDS = 300_000
MAX_DEPTH = 50
MAX_TAG = 2**32 - 1
NO_FIELD = "no field begins here; expected protobuf's binary format"
INT64, UINT64 = 2**63, 2**64

Buffer = bytes | memoryview


class WirePart(NamedTuple):
    """A field, or a run of fields with the same number and a fixed width."""

    number: int
    kind: int
    value: int
    """Value of a VARINT; number of fields in a run of FIXED32 or FIXED64; otherwise 0."""
    start: int
    """The start of the content (BYTES), or of a run with its tags."""
    stop: int


class Wire:
    def __init__(self, content: bytes | mmap.mmap, where: str) -> None:
        self.content, self.where = content, where
        self.left = MAX_FIELDS

    def __len__(self) -> int:
        return len(self.content)

    def error(self, at: int, what: str) -> CaffeError:
        return CaffeError(f"{self.where}: byte {at:,}: {what}")

    def parts(self, start: int, stop: int) -> Iterator[WirePart]:
        """Yield the message's fields; groups are skipped. Raises CaffeError on invalid bytes."""
        groups: list[int] = []
        at = start
        while at < stop:
            self.left -= 1
            if self.left < 0:
                raise self.error(at, f"more than {MAX_FIELDS:,} fields")
            begin = at
            part, at = self._part(at, stop)
            if part.kind == GROUP:
                groups.append(part.number)
                if len(groups) > MAX_DEPTH:
                    raise self.error(begin, f"groups are nested more than {MAX_DEPTH} deep")
            elif part.kind == END_OF_GROUP:
                if not groups or groups.pop() != part.number:
                    raise self.error(begin, NO_FIELD)
            elif not groups:
                yield part
        if groups:
            raise self.error(at, "a group that does not end")

    def varint(self, at: int, stop: int) -> tuple[int, int]:
        """Read a number below 2^64. Return it and the position of the next byte."""
        number = 0
        for place in range(10):
            if at + place >= stop:
                raise self.error(at, "a number that does not end within its message")
            byte = self.content[at + place]
            number |= (byte & 127) << 7 * place
            if byte < 128:
                return number % UINT64, at + place + 1
        raise self.error(at, "a number of more than 10 bytes")

    def varints(self, part: WirePart) -> Iterator[int]:
        """Yield the signed numbers of a field, packed or not; none for another kind of field."""
        if part.kind == VARINT:
            yield signed(part.value)
        at = part.start
        while part.kind == BYTES and at < part.stop:
            number, at = self.varint(at, part.stop)
            yield signed(number)

    def fixed(self, part: WirePart, width: int) -> NDArray[np.floating] | None:
        """Return a view of the float32 (width 4) or float64 (8) numbers; None for another kind."""
        dtype = {4: "<f4", 8: "<f8"}[width]
        length = part.stop - part.start
        if part.kind == BYTES:
            if length % width:
                raise self.error(part.start, f"{length:,} bytes of numbers of {width} bytes each")
            return np.ndarray((length // width,), dtype, self.content, part.start)
        if WIDTHS.get(part.kind) != width:
            return None
        step = length // part.value
        first = part.start + step - width
        return np.ndarray((part.value,), dtype, self.content, first, (step,))

    def text(self, part: WirePart) -> bytes:
        return self.content[part.start : part.stop]

    def _part(self, at: int, stop: int) -> tuple[WirePart, int]:
        tag, start = self.content[at], at + 1
        if tag > 127:
            tag, start = self.varint(at, stop)
        number, kind = tag >> 3, tag & 7
        if not number or tag > MAX_TAG or kind > FIXED32:
            raise self.error(at, NO_FIELD)
        if kind == VARINT:
            value, end = self.varint(start, stop)
            return WirePart(number, kind, value, start, end), end
        if kind == BYTES:
            length, start = self.varint(start, stop)
            if length > stop - start:
                what = f"{length:,} bytes are said to follow, where {stop - start:,} are left"
                raise self.error(at, what)
            return WirePart(number, kind, 0, start, start + length), start + length
        if kind in WIDTHS:
            step = start - at + WIDTHS[kind]
            if step > stop - at:
                raise self.error(at, "a number that does not end within its message")
            count = self._run(at, stop, step) if start == at + 1 else 1
            end = at + count * step
            return WirePart(number, kind, count, at, end), end
        return WirePart(number, kind, 0, start, start), start

    def _run(self, at: int, stop: int, step: int) -> int:
        most = (stop - at) // step
        count, chunk = 1, 16
        while count < most:
            chunk = min(chunk * 16, 1 << 20, most - count)
            shape, first = (chunk,), at + count * step
            tags = np.ndarray(shape, np.uint8, self.content, first, (step,))
            others = np.flatnonzero(tags != self.content[at])
            if len(others):
                return count + int(others[0])
            count += chunk
        return count


def opened(path: Path) -> Wire:
    """Map the file into memory. Raises CaffeError if it cannot be read."""
    try:
        if not path.is_file():
            raise CaffeError(f"{path}: is no file")
        with path.open("rb") as file:
            is_empty = not file.seek(0, 2)
            content = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CaffeError(f"{path}: cannot be read, {reason}") from error
    return Wire(content, str(path))


def signed(number: int) -> int:
    return number - UINT64 if number >= INT64 else number


def varint(number: int) -> bytes:
    number %= UINT64
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, value: int | bytes | Sequence[Buffer]) -> list[Buffer]:
    """Encode a field: a varint, bytes, or a message given as its encoded fields."""
    if isinstance(value, int):
        return [varint(number << 3 | VARINT) + varint(value)]
    parts = [value] if isinstance(value, bytes) else value
    length = sum(map(len, parts))
    return [varint(number << 3 | BYTES) + varint(length), *parts]


LEGACY = (1, 2, 3, 4)
"""Field numbers of num, channels, height and width: the form of `shape` in older files."""
DATA, SHAPE, DOUBLE_DATA = 5, 7, 8
DIM = 1
MAX_AXES = 32
MAX_DIM = 2**31 - 1
MAX_PIECES = 10_000
"""The maximum fields into which the numbers of a blob may be split."""

Array = NDArray[np.float32]


def read_blob(wire: Wire, start: int, stop: int) -> Array:
    """Read a blob in the file's shape. Raises CaffeError if it is damaged or its sizes disagree."""
    legacy: dict[int, int] = {}
    dims: list[int] = []
    pieces: dict[int, list[NDArray[np.floating]]] = {DATA: [], DOUBLE_DATA: []}
    for part in wire.parts(start, stop):
        if part.number in LEGACY and part.kind == VARINT:
            legacy[part.number] = signed(part.value)
        elif part.number == SHAPE and part.kind == BYTES:
            dims += _dims(wire, part)
        elif part.number in pieces:
            piece = wire.fixed(part, 4 if part.number == DATA else 8)
            if piece is not None:
                pieces[part.number].append(piece)
            if len(pieces[part.number]) > MAX_PIECES:
                raise wire.error(part.start, f"numbers in more than {MAX_PIECES:,} pieces")
    shape = tuple(legacy.get(axis, 0) for axis in LEGACY) if legacy else tuple(dims)
    numbers = pieces[DOUBLE_DATA] if any(map(len, pieces[DOUBLE_DATA])) else pieces[DATA]
    count = sum(map(len, numbers))
    if len(shape) > MAX_AXES or any(not 0 <= dim <= MAX_DIM for dim in shape):
        raise wire.error(start, f"a blob of shape {_shown(shape)}")
    if prod(shape) != count:
        raise wire.error(start, f"a blob of shape {_shown(shape)} with {count:,} numbers")
    array = np.empty(shape, np.float32)
    flat, at = array.reshape(-1), 0
    with np.errstate(over="ignore"):  # a double beyond float32 is infinite, as in Caffe
        for piece in numbers:
            flat[at : at + len(piece)] = piece
            at += len(piece)
    return array


def blob_fields(array: Array, legacy: bool = False) -> list[Buffer]:
    """Encode a blob without copying its numbers. `legacy`: with the four sizes of older files."""
    numbers = np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8)
    data = field(DATA, [numbers.data])
    if legacy:
        axes = zip(LEGACY, array.shape, strict=True)
        return [part for axis, size in axes for part in field(axis, size)] + data
    return [*field(SHAPE, field(DIM, b"".join(map(varint, array.shape)))), *data]


def _dims(wire: Wire, shape: WirePart) -> list[int]:
    dims: list[int] = []
    for part in wire.parts(shape.start, shape.stop):
        for dim in wire.varints(part) if part.number == DIM else ():
            dims.append(dim)
            if len(dims) > MAX_AXES:
                raise wire.error(shape.start, f"a blob of more than {MAX_AXES} axes")
    return dims


def _shown(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def read_mean(path: Path) -> Array:
    """Read one image (C, H, W), blue first as in the file. Raises CaffeError on any other blob."""
    wire = opened(path)
    array = read_blob(wire, 0, len(wire))
    image = array[0] if array.ndim == 4 and len(array) == 1 else array
    if image.ndim != 3 or not image.size:
        raise CaffeError(f"{path}: a blob of shape {array.shape}; expected one image, of C, H, W")
    return image


def write_mean(path: Path, image: Array) -> None:
    """Write an image of shape (C, H, W) as a .binaryproto that every Caffe version reads."""
    with path.open("wb") as file:
        file.writelines(blob_fields(image[None], legacy=True))


ITERATION, LEARNED_NET, HISTORY, CURRENT_STEP = 1, 2, 3, 4
MAX_BLOBS = 20_000
MAX_PATH_BYTES = 10_000


class SolverState(NamedTuple):
    iteration: int
    learned_net: str
    """Path of the weights on the host that trained them; empty if the file does not state it."""
    current_step: int
    """The number of stepvalues already passed, for lr_policy multistep."""
    history: list[Array]
    """The solver's arrays, in the net's order. SGD has one per unshared parameter, its momentum.

    Solvers with two arrays per parameter have all the first arrays, then all the second.
    """


def read_solverstate(path: Path) -> SolverState:
    """Read a .solverstate. Raises CaffeError (one line) if the file is damaged or not one."""
    wire = opened(path)
    numbers: dict[int, int] = {}
    learned_net, places = "", []
    for part in wire.parts(0, len(wire)):
        if part.kind == VARINT:
            numbers[part.number] = signed(part.value)
        elif part.kind == BYTES and part.number == LEARNED_NET:
            if part.stop - part.start > MAX_PATH_BYTES:
                raise wire.error(part.start, f"a path of more than {MAX_PATH_BYTES:,} bytes")
            learned_net = decoded(wire.text(part))
        elif part.kind == BYTES and part.number == HISTORY:
            places.append(part)
        if len(places) > MAX_BLOBS or len(numbers) > MAX_BLOBS:
            raise wire.error(part.start, f"more than {MAX_BLOBS:,} blobs")
    iteration, step = numbers.get(ITERATION, -1), numbers.get(CURRENT_STEP, 0)
    if iteration < 0 or step < 0:
        raise CaffeError(f"{path}: says no iteration; expected a .solverstate")
    history = [read_blob(wire, place.start, place.stop) for place in places]
    return SolverState(iteration, learned_net, step, history)
