"""Parse and write protobuf's binary format without a schema, as in .caffemodel files.

Source: "Encoding", protobuf.dev/programming-guides/encoding. Nothing is copied: a field is given by
its place in the file. The number of fields read and the nesting of groups are bounded.
"""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firecaffe.caffe.message import CaffeError

VARINT, FIXED64, BYTES, GROUP, END_OF_GROUP, FIXED32 = range(6)
WIDTHS = {FIXED64: 8, FIXED32: 4}
MOST_FIELDS = 300_000
MOST_DEPTH = 50
MOST_TAG = 2**32 - 1
NO_FIELD = "no field begins here; expected protobuf's binary format"
INT64, UINT64 = 2**63, 2**64

Buffer = bytes | memoryview


class WirePart(NamedTuple):
    """A field, or a run of fields with the same number and a fixed width."""

    number: int
    kind: int
    value: int
    """The value of a VARINT; the number of fields in a run of FIXED32 or FIXED64; else 0."""
    start: int
    """The start of the content (BYTES), or of a run with its tags."""
    stop: int


class Wire:
    def __init__(self, content: bytes | mmap.mmap, where: str) -> None:
        self.content, self.where = content, where
        self.left = MOST_FIELDS

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
                raise self.error(at, f"more than {MOST_FIELDS:,} fields")
            begin = at
            part, at = self._part(at, stop)
            if part.kind == GROUP:
                groups.append(part.number)
                if len(groups) > MOST_DEPTH:
                    raise self.error(begin, f"groups are nested more than {MOST_DEPTH} deep")
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
        """Yield the signed numbers of a field, packed or not; none if it is of another kind."""
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
        if not number or tag > MOST_TAG or kind > FIXED32:
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
