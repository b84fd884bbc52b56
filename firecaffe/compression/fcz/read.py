"""Reads a .fcz file, at once or tensor by tensor, and reports what its bytes are spent on.

A file may be malicious, so it is checked before memory is allocated: the header's length is
limited, its checksum is verified first, and the decoded size must be plausible and allowed.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import (
    BlockReader,
    DamagedError,
    Outline,
    allowed_bytes,
    read_header,
)
from firecaffe.compression.fcz.gaps import read_gaps
from firecaffe.compression.fcz.mask import read_mask
from firecaffe.compression.fcz.patterns import GAPS, Patterns, unsigned
from firecaffe.compression.fcz.values import read_values
from firecaffe.errors import CheckpointError
from firecaffe.files import open_regular

SCANNED = 1 << 13
"""Elements that are searched together for kept ones."""


class Opened:
    def __init__(self, path: Path, most_bytes: int | None) -> None:
        self._path = path
        try:
            self._file: BinaryIO = open_regular(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        try:
            file_bytes = os.fstat(self._file.fileno()).st_size
            header = read_header(self._file, file_bytes)
            self.network: dict[str, Any] = header.network
            """The network that was given to `write`."""
            self.outlines: Sequence[Outline] = header.tensors
            """Name, type and shape of each tensor, in the order of the file."""
            needed = sum(tensor.num_bytes for tensor in header.tensors)
            most_bytes = allowed_bytes(file_bytes) if most_bytes is None else most_bytes
            if needed > most_bytes:
                raise DamagedError(
                    f"its tensors need {needed:,} bytes; allowed are {most_bytes:,} of a file of "
                    f"{file_bytes:,}"
                )
        except (DamagedError, OSError) as error:
            self._file.close()
            raise CheckpointError(f"{path}: no .fcz file, or damaged: {error}") from error
        self._start = self._file.tell()
        self._body_bytes = header.body_bytes

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield each tensor by name, decoded on demand. Raises CheckpointError if damaged.

        Besides tensors that the caller holds, it takes less than 1 MB. The last tensor is yielded
        after the whole file was verified.
        """
        try:
            self._file.seek(self._start)
            reader = BlockReader(self._file, self._body_bytes)
            for place, outline in enumerate(self.outlines, 1):
                array = _read_tensor(reader, outline)
                if place == len(self.outlines):
                    reader.finish()
                yield outline.name, array
                del array
            if not self.outlines:
                reader.finish()
        except (DamagedError, OSError) as error:
            raise CheckpointError(f"{self._path}: damaged: {error}") from error

    def __enter__(self) -> "Opened":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def read(path: str | Path, *, most_bytes: int | None = None) -> Opened:
    """Open a file: `with read(path) as file: for name, array in file.tensors(): …`.

    Args:
        path: The file.
        most_bytes: The most bytes that its tensors may need together, decoded; None for what is
            plausible for the size of the file (`allowed_bytes`).

    Raises: CheckpointError if it is no .fcz file, is damaged, of another version, or too large.
    """
    return Opened(Path(path), most_bytes)


def _read_tensor(reader: BlockReader, outline: Outline) -> NDArray[Any]:
    dtype = np.dtype(outline.dtype)
    size, shape = outline.size, outline.shape
    kept = reader.number(size + 1)
    flat: Patterns = np.zeros(size, unsigned(dtype))
    matrix, distance = None, 0
    if 0 < kept < size:
        if reader.number(2) == GAPS:
            for positions in read_gaps(reader, kept, size):
                flat[positions] = 1
        else:
            view = read_mask(reader, flat, shape, kept)
            if view.distance:
                matrix, distance = view.matrix(flat, shape), view.distance
    if kept:
        is_float32 = outline.dtype == "float32"
        values = read_values(reader, flat.dtype, kept, is_float32, matrix, distance)
        _fill(flat, kept, values)
    if dtype.kind == "b" and size and int(flat.max()) > 1:
        raise DamagedError(f"{outline.name!r} is of truth values, and has others")
    return flat.view(dtype).reshape(shape)


def _fill(flat: Patterns, kept: int, values: Iterator[Patterns]) -> None:
    if kept == len(flat):
        start = 0
        for value in values:
            flat[start : start + len(value)] = value
            start += len(value)
        return
    waiting = np.empty(0, np.int64)
    scanned = 0
    for value in values:
        while len(waiting) < len(value):
            places = np.flatnonzero(flat[scanned : scanned + SCANNED]) + scanned
            waiting = np.concatenate([waiting, places])
            scanned += SCANNED
        flat[waiting[: len(value)]] = value
        waiting = waiting[len(value) :]
