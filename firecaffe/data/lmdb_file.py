"""Reader of an LMDB: keys and values by their number, in the order of the keys.

LMDB's own library maps the file and trusts it, so a damaged file ends the process by a signal. Here
pages are read, and each number in them is checked. Pages have one size; numbers are little-endian.

    page           its number (8 bytes), 2 unused, flags (2), start and end of its free space
                   (2, 2); then the offset of each node in the page (2 each)
    overflow page  its number (8), 2 unused, flags (2), pages (4); then a value, across these pages
    meta page      after 16 bytes: magic (4), version (4), 16 unused, two trees of 48 bytes: free
                   pages and the data; the last page (8), the transaction (8). The first two pages
                   are meta pages; the one with the later transaction counts
    tree           page size (4, of the first tree), flags (2), depth (2), 24 unused, values (8),
                   the root's page (8)
    node           in a branch: page (6), bytes of the key (2), key
                   in a leaf: bytes of the value (4), flags (2), bytes of the key (2), key, and the
                   value or the number of its overflow page (8)

Source: LMDB 0.9, libraries/liblmdb/mdb.c (MDB_page, MDB_meta, MDB_db, MDB_node), on 64 bits.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from firecaffe.data.dataset import reading
from firecaffe.errors import DataError
from firecaffe.files import open_regular

FILE = "data.mdb"
MAGIC, VERSION = 0xBEEFC0DE, 1

PAGE_BYTES, NODE_BYTES = 16, 8
"""Sizes of the headers of a page and a node."""

META = struct.Struct("<II16xIHH24xQQ IHH24xQQ QQ")

BRANCH, LEAF = 1, 2
KINDS = 0x6F
"""The flags that state the kind of a page."""

OVERFLOW, TREE, SEVERAL = 1, 2, 4
"""Flags of a leaf's node: value in overflow pages; value is a database; key has several values."""

SORTED_DUPLICATES = 4
"""The flag of a tree whose keys may have several values."""

EMPTY = 2**64 - 1
"""The root of a tree without values."""

PAGE_SIZES = tuple(1 << bits for bits in range(9, 17))
MAX_DEPTH = 32
MAX_KEY = (1 << 16) - 1
MIN_NODE = NODE_BYTES + 2
"""Minimum bytes of a page that a node uses, with its offset."""

LOOKED_AT = 1 << 20

Ints = NDArray[np.int64]
Numbers = NDArray[np.uint64]


class LmdbFile:
    """Values of an LMDB, read on request by any thread. Raises DataError if missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._file: BinaryIO = open_regular(folder / FILE)
        except OSError as error:
            raise DataError(f"{folder}: is no LMDB, {FILE}: {error.strerror or error}") from error
        self._size = os.fstat(self._file.fileno()).st_size
        self._page_size, root, depth, count = self._newest()
        self._last = self._size // self._page_size
        parts = [np.empty((3, 0), np.int64)]
        if count:
            parts += map(np.stack, self._nodes(self._leaves(root, depth)))
        # Offsets in the file, and sizes: 24 bytes of memory per value.
        self._nodes_N, self._starts_N, self._sizes_N = np.concatenate(parts, axis=1)
        if len(self) != count:
            raise self._damaged(f"it holds {len(self):,} values and says {count:,}")

    def __len__(self) -> int:
        return len(self._nodes_N)

    def key(self, number: int) -> bytes:
        node = self._read(int(self._nodes_N[number]), NODE_BYTES + MAX_KEY, or_less=True)
        return node[NODE_BYTES:][: int.from_bytes(node[NODE_BYTES - 2 : NODE_BYTES], "little")]

    def value(self, number: int) -> bytes:
        return self._read(int(self._starts_N[number]), int(self._sizes_N[number]))

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _newest(self) -> tuple[int, int, int, int]:
        metas = [self._meta(0)]
        page_size = metas[0][0] if metas[0] else 0
        # The first meta page states the page size, and thus the offset of the second.
        metas += [self._meta(size) for size in ((page_size,) if page_size else PAGE_SIZES)]
        whole = [meta for meta in metas if meta is not None]
        if not whole:
            raise self._damaged("it begins with no page of LMDB's, of 64 bits, version 1")
        return max(whole, key=lambda meta: meta[-1])[:4]

    def _meta(self, place: int) -> tuple[int, int, int, int, int] | None:
        content = self._read(place, PAGE_BYTES + META.size, or_less=True)
        if len(content) < PAGE_BYTES + META.size:
            return None
        magic, version, page_size, *_, flags, depth, count, root, _, transaction = META.unpack_from(
            content[PAGE_BYTES:]
        )
        if (magic, version) != (MAGIC, VERSION) or page_size not in PAGE_SIZES:
            return None
        if flags & SORTED_DUPLICATES:
            raise self._damaged("its keys have several values; Caffe's have one")
        return page_size, root, depth, 0 if root == EMPTY else count, transaction

    def _leaves(self, root: int, depth: int) -> Numbers:
        if not 0 < depth <= MAX_DEPTH:
            raise self._damaged(f"its tree is {depth} pages deep; at most {MAX_DEPTH}")
        pages, pages_left = np.array([root], np.uint64), self._last
        for _ in range(depth - 1):
            children = []
            for _, uint16s, nodes in self._pages(pages, BRANCH):
                low, middle, high = (
                    uint16s[nodes + offset].astype(np.uint64) for offset in range(3)
                )
                children.append(low | middle << np.uint64(16) | high << np.uint64(32))
            pages = np.concatenate(children)
            pages_left -= len(pages)
            if pages_left < 0:
                raise self._damaged("its pages refer to each other more than once")
        return pages

    def _nodes(self, leaves: Numbers) -> Iterator[tuple[Ints, Ints, Ints]]:
        for places, uint16s, nodes in self._pages(leaves, LEAF):
            sizes = uint16s[nodes].astype(np.int64) | uint16s[nodes + 1].astype(np.int64) << 16
            flags, key_bytes = uint16s[nodes + 2], uint16s[nodes + 3].astype(np.int64)
            if (flags & (TREE | SEVERAL)).any():
                raise self._damaged("it holds named databases; Caffe's hold values")
            starts = places + NODE_BYTES + key_bytes
            is_apart = flags & OVERFLOW > 0
            ends = starts + np.where(is_apart, 8, sizes)
            if (ends > (places // self._page_size + 1) * self._page_size).any():
                raise self._damaged("a node is longer than its page")
            inside = (2 * nodes + NODE_BYTES + key_bytes)[is_apart]
            content = uint16s.view(np.uint8)[inside[:, None] + np.arange(8)]
            pages = np.ascontiguousarray(content).view("<u8")[:, 0]
            if (pages >= self._last).any():
                raise self._damaged("a value lies beyond the end; it is truncated")
            starts[is_apart] = pages.astype(np.int64) * self._page_size + PAGE_BYTES
            if (starts + sizes > self._size).any():
                raise self._damaged("a value lies beyond the end; it is truncated")
            yield places, starts, sizes

    # Yields, for some pages at a time: the nodes' offsets in the file, the pages as uint16 values,
    # and the nodes' indices among these values.
    def _pages(
        self, numbers: Numbers, kind: int
    ) -> Iterator[tuple[Ints, NDArray[np.uint16], Ints]]:
        if (numbers >= self._last).any():
            raise self._damaged(f"it has no page {numbers.max()}; it is truncated")
        size = self._page_size
        for part in np.split(numbers, range(LOOKED_AT // size, len(numbers), LOOKED_AT // size)):
            content = b"".join(self._read(number * size, size) for number in part.tolist())
            uint16s = np.frombuffer(content, "<u2")
            kinds, lower, upper = uint16s.reshape(len(part), -1)[:, 5:8].astype(np.int64).T
            stored_numbers = np.frombuffer(content, "<u8").reshape(len(part), -1)[:, 0]
            counts = (lower - PAGE_BYTES) // 2
            fits = (counts >= (kind == BRANCH)) & (lower <= upper) & (upper <= size)
            fits &= PAGE_BYTES + counts * MIN_NODE <= size
            wrong = (stored_numbers != part) | (kinds & KINDS != kind) | ~fits
            if wrong.any():
                raise self._damaged(f"page {part[wrong][0]} is none of its tree's")
            rows = np.repeat(np.arange(len(part)), counts)
            number_in_page = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
            places = uint16s[(rows * size + PAGE_BYTES) // 2 + number_in_page].astype(np.int64)
            if ((places < upper[rows]) | (places > size - NODE_BYTES) | (places & 1 > 0)).any():
                raise self._damaged("a page has a node outside of itself")
            nodes = (rows * size + places) // 2
            yield part.astype(np.int64)[rows] * size + places, uint16s, nodes

    def _read(self, start: int, length: int, or_less: bool = False) -> bytes:
        with reading(self.folder):
            content = os.pread(self._file.fileno(), length, start)
        if len(content) < length and not or_less:
            raise self._damaged("it was cut since it was opened")
        return content

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.folder}: not a whole LMDB, {why}")
