"""A shard: many samples in one file, each fetched in one read. Layout: docs/reference/shards.md.

    0    prologue: magic, version, length and offset of the header, length of the file, a checksum
    40   the samples' bytes, one after the other
    ...  offsets (count + 1), labels and CRC-32s (count each), little-endian, at multiples of 8
    ...  header: JSON

The index follows the samples, so a shard is written in one pass. The prologue is written last, so
an unfinished file is not a valid shard.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from firecaffe.data.dataset import BrokenSampleError
from firecaffe.errors import DataError
from firecaffe.files import create_empty, sha256_of
from firecaffe.schema import Count, Positive, decoded

MAGIC = b"FIRECAFF"
VERSION = 1
PROLOGUE = struct.Struct("<8sIIQQII")
"""Magic, version, header length, header offset, file length, CRC-32 of the header, 0."""

KINDS = ("jpeg", "raw")
"""Encoded images, unchanged (JPEG, PNG, WebP); or pixels of one shape: bytes of C x H x W."""

MAX_HEADER_BYTES = 16_000_000

Read = Callable[[int, int], bytes]
"""A function (start, length) -> bytes; fewer than `length` at the end of the file."""


@dataclass(frozen=True)
class ShardInfo:
    file: Annotated[str, Meta(pattern=r"^[^/\0]*[^/\0.][^/\0]*$")]
    count: Count
    num_bytes: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class ShardHeader:
    kind: str
    shape: tuple[Positive, ...]
    count: Count
    index_at: Count
    index_crc32: Count
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class ShardIndex:
    kind: str
    shape: tuple[int, ...]
    """Channels, rows and columns of raw samples; empty for encoded ones."""
    offsets: NDArray[np.uint64]
    labels: NDArray[np.uint32]
    checksums: NDArray[np.uint32]
    skipped: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


def read_index(read: Read, name: str, num_bytes: int) -> ShardIndex:
    """Read a shard's index. Raises DataError if the file is truncated, damaged, or no shard."""
    prologue = read(0, PROLOGUE.size)
    if len(prologue) < PROLOGUE.size:
        raise DataError(f"{name}: {num_bytes} bytes long; a shard has at least {PROLOGUE.size}")
    magic, version, header_bytes, header_at, expected, header_crc, _ = PROLOGUE.unpack(prologue)
    if magic != MAGIC:
        raise DataError(f"{name}: begins with {magic!r}; a shard begins with {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{name}: is of version {version}; this firecaffe reads {VERSION}")
    if num_bytes != expected:
        how = "truncated" if num_bytes < expected else "longer than it was"
        raise DataError(f"{name}: {num_bytes} bytes long, {how}; it was written with {expected}")
    if header_bytes > MAX_HEADER_BYTES or header_at + header_bytes != expected:
        raise DataError(f"{name}: its prologue is damaged")
    header = read(header_at, header_bytes)
    if zlib.crc32(header) != header_crc:
        raise DataError(f"{name}: its header is damaged (CRC-32)")
    try:
        return _read_index(decoded(header, ShardHeader), read, name, header_at)
    except ValueError as error:
        raise DataError(f"{name}: its header lacks what it should say ({error})") from error


def _read_index(header: ShardHeader, read: Read, name: str, header_at: int) -> ShardIndex:
    count, at = header.count, header.index_at
    if at < PROLOGUE.size or at + _index_bytes(count) != header_at:
        raise DataError(f"{name}: its index is not where its header says")
    index = read(at, _index_bytes(count))
    if len(index) < _index_bytes(count) or zlib.crc32(index) != header.index_crc32:
        raise DataError(f"{name}: its index is damaged (CRC-32)")
    offsets = np.frombuffer(index, "<u8", count + 1)
    labels = np.frombuffer(index, "<u4", count, 8 * (count + 1))
    checksums = np.frombuffer(index, "<u4", count, 8 * (count + 1) + _padded(4 * count))
    if (offsets[1:] < offsets[:-1]).any() or offsets[-1] > at:
        raise DataError(f"{name}: its samples overlap")
    return ShardIndex(header.kind, header.shape, offsets, labels, checksums, header.skipped)


def _padded(length: int) -> int:
    return -(-length // 8) * 8


def _index_bytes(count: int) -> int:
    return 8 * (count + 1) + 2 * _padded(4 * count)


def least_bytes(count: int, shape: tuple[int, ...]) -> int:
    """Return the minimum bytes of a shard of `count` samples. `shape` is empty if encoded."""
    return PROLOGUE.size + _index_bytes(count) + (count * prod(shape) if shape else 0)


def read_sample(read: Read, index: ShardIndex, number: int, name: str) -> bytes:
    """Read a sample. Raises DataError if truncated, BrokenSampleError if its bytes have changed."""
    start, end = int(index.offsets[number]), int(index.offsets[number + 1])
    content, length = read(start, end - start), end - start
    if len(content) != length:
        raise DataError(f"{name}: {len(content)} of {length} bytes could be read; it is truncated")
    if zlib.crc32(content) != index.checksums[number]:
        raise BrokenSampleError(f"{name}: its bytes are not those that were packed (CRC-32)")
    return content


class ShardWriter:
    """Writer of one shard, under a temporary name. `finish` renames it; otherwise it is deleted."""

    def __init__(self, path: Path, kind: str, shape: tuple[int, ...] = ()) -> None:
        self.path, self.kind, self.shape = path, kind, shape
        self.skipped: list[str] = []
        self._aside = create_empty(path.with_name(f"{path.name}.partial"))
        self._file = self._aside.open("wb")
        self._file.write(bytes(PROLOGUE.size))
        self._offsets = [PROLOGUE.size]
        self._labels: list[int] = []
        self._checksums: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()  # flushing the rest raises if the disk is full
        finally:
            self._aside.unlink(missing_ok=True)

    def add(self, content: bytes, label: int) -> None:
        self._file.write(content)
        self._offsets.append(self._offsets[-1] + len(content))
        self._labels.append(label)
        self._checksums.append(zlib.crc32(content))

    def finish(self) -> ShardInfo:
        """Write the index and the prologue, sync, and rename the file."""
        file, count = self._file, len(self._labels)
        at = _padded(self._offsets[-1])
        file.write(bytes(at - self._offsets[-1]))
        padding = bytes(_padded(4 * count) - 4 * count)
        index = b"".join(
            [
                np.array(self._offsets, "<u8").tobytes(),
                np.array(self._labels, "<u4").tobytes() + padding,
                np.array(self._checksums, "<u4").tobytes() + padding,
            ]
        )
        index_crc, skipped = zlib.crc32(index), tuple(self.skipped)
        described = ShardHeader(self.kind, self.shape, count, at, index_crc, skipped)
        header = json.dumps(asdict(described)).encode()
        file.write(index + header)
        num_bytes = file.tell()
        file.seek(0)
        file.write(
            PROLOGUE.pack(
                MAGIC, VERSION, len(header), at + len(index), num_bytes, zlib.crc32(header), 0
            )
        )
        file.flush()
        os.fsync(file.fileno())
        file.close()
        sha256 = sha256_of(self._aside)
        os.replace(self._aside, self.path)
        return ShardInfo(self.path.name, count, num_bytes, sha256)
