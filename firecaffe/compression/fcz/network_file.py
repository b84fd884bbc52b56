"""Reads and writes a network in a .fcz file, with a report of the use of its bytes.

A file may be malicious, so it is checked before memory is allocated: the header's length is
limited, its checksum is verified first, and the decoded size must be plausible and allowed.

Kept positions are a mask or gaps: the number of zeros before each kept element. In a gap of
2^b - 1 zeros or more, a symbol that skips as many is repeated; then follows the remainder.
Source: Han, Mao and Dally 2016, section 3, which skips by a kept zero.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, get_args

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import (
    DTYPES,
    GAPS,
    MASK,
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_TENSORS,
    BlockReader,
    BlockWriter,
    DamagedError,
    Outline,
    Patterns,
    Symbols,
    allowed_bytes,
    header_bytes,
    patterns_of,
    read_header,
    unsigned,
)
from firecaffe.compression.fcz.mask import TRIED, View, cheapest_view, read_mask, write_mask
from firecaffe.compression.fcz.sequence import (
    How,
    code_lengths,
    entropy_bytes,
    read_sequence,
    write_sequence,
)
from firecaffe.compression.fcz.values import KeptValues, read_values, write_values
from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.files import atomic_replace, open_regular

SCANNED = 1 << 13
"""The number of elements that are searched for kept ones at a time."""


@dataclass(frozen=True)
class TensorReport:
    """One tensor's part of a file. Sizes have fractions, because all tensors share one coder."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    kept: int
    """The number of elements whose bits are not 0."""
    distinct: int
    """Distinct values of the kept elements; 0 if they are too many for a codebook."""
    mask_bytes: float
    codebook_bytes: float
    symbol_bytes: float
    """Bytes of the indices into the codebook, or of the values themselves."""
    floor_bytes: float
    """Size of the codebook, and entropy of mask and values. Structured ones may take less."""

    @property
    def num_bytes(self) -> float:
        return self.mask_bytes + self.codebook_bytes + self.symbol_bytes


@dataclass(frozen=True)
class FileReport:
    num_bytes: int
    tensors: Sequence[TensorReport]

    @property
    def raw_bytes(self) -> int:
        return sum(tensor.size * np.dtype(tensor.dtype).itemsize for tensor in self.tensors)

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.num_bytes


class FczFile:
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

        It takes less than 1 MB besides tensors that the caller holds. The last tensor is yielded
        after the whole file is verified.
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

    def __enter__(self) -> "FczFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read(path: str | Path, *, most_bytes: int | None = None) -> FczFile:
    """Open a file: `with read(path) as file: for name, array in file.tensors(): …`.

    `most_bytes` limits its decoded tensors; None: to what is plausible (`allowed_bytes`). Raises
    CheckpointError if it is no .fcz file, is damaged, of another version, or too large.
    """
    return FczFile(Path(path), most_bytes)


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


MAX_GAP_BITS = 15
TABLED = 1 << 16
"""The number of distances by which the alphabet is chosen."""

MAX_SKIPS = 1.25
"""The maximum mean of symbols per distance, with a range coder."""

BITS_OF_TABLE = 5
"""The approximate bits that the coder takes to learn a symbol's count."""


def write_gaps(writer: BlockWriter, positions: NDArray[np.int64], size: int, how: How) -> None:
    """Write the ascending positions of the kept elements, at least one, of a tensor of `size`."""
    zeros = np.diff(positions, prepend=-1) - 1
    bits = _cheapest_bits(zeros[:TABLED], how)
    symbols = _symbols(zeros, (1 << bits) - 1)
    writer.number(bits - 1, MAX_GAP_BITS)
    writer.number(len(symbols) - 1, size)
    write_sequence(writer, [symbols], 1 << bits, how)


def bits_of_gaps(part: NDArray[np.bool_], how: How) -> float:
    trial = BlockWriter()
    if part.any():
        write_gaps(trial, np.flatnonzero(part), len(part), how)
    return trial.bits / len(part)


def read_gaps(reader: BlockReader, kept: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the positions in ascending chunks. Raises DamagedError."""
    bits = reader.number(MAX_GAP_BITS) + 1
    count = reader.number(size) + 1
    skips = (1 << bits) - 1
    base = num_positions = 0
    for (symbols,) in read_sequence(reader, 1, count, 1 << bits):
        stops = symbols.astype(np.int64)
        stops += symbols != skips
        np.cumsum(stops, out=stops)
        stops += base
        base = int(stops[-1])
        if base > size:
            raise DamagedError("a distance leads beyond the end of its tensor")
        positions = stops[symbols != skips] - 1
        num_positions += len(positions)
        yield positions
    if num_positions != kept:
        raise DamagedError(f"{num_positions} distances for {kept} kept elements")


def _symbols(zeros: NDArray[np.int64], skips: int) -> Symbols:
    times = zeros // skips
    rest = (zeros - times * skips).astype(np.int32)
    ends = np.cumsum(times + 1)
    if ends[-1] == len(zeros):
        return rest
    symbols = np.full(int(ends[-1]), skips, np.int32)
    symbols[ends - 1] = rest
    return symbols


def _cheapest_bits(zeros: NDArray[np.int64], how: How) -> int:
    def cost(bits: int) -> float:
        symbols = _symbols(zeros, (1 << bits) - 1)
        if len(symbols) > MAX_SKIPS * len(zeros) and how != "huffman":
            return inf
        counts = np.bincount(symbols)
        table = BITS_OF_TABLE * min(1 << bits, len(symbols))
        if how == "huffman":
            return float((counts * code_lengths(counts)).sum()) + table
        return 8 * entropy_bytes(counts) + table

    # Each skip takes time, so alphabets that need many are excluded.
    most = max(1, int(zeros.max()).bit_length())
    return min(range(1, min(most, MAX_GAP_BITS) + 1), key=cost)


CODES: tuple[How, ...] = get_args(How)
"""The codings of a file: the best one for each section, or a single one."""

CLEAR = 0.98
COPIED = 1 << 20


def write(
    path: str | Path,
    tensors: Mapping[str, NDArray[Any]],
    network: Mapping[str, Any],
    *,
    code: How = "best",
) -> FileReport:
    """Write tensors exactly. An incomplete file never has the final name.

    The same tensors and network give the same bytes. Zeros and shared values are detected: pruned
    elements are 0, and a tensor with few distinct values gets a codebook.

    Args:
        network: JSON that says how the network is made; `read` returns it.
        code: "huffman" codes distances and values as Deep Compression does; "range" uses a range
            coder alone; "best" takes the smallest in each section.

    Raises: RecipeError if a tensor's type cannot be written, the network is not JSON, or `read`
    would refuse the file because of its tensors' size; OSError.
    """
    if code not in CODES:
        raise RecipeError(f"code is {code!r}; expected one of {', '.join(CODES)}")
    outlines = [outline_of(name, array) for name, array in tensors.items()]
    if len(outlines) > MAX_TENSORS:
        raise RecipeError(f"{len(outlines)} tensors; a .fcz file has at most {MAX_TENSORS}")
    path = Path(path)
    with TemporaryFile() as body:
        writer = BlockWriter(body)
        reports = [
            _write_tensor(writer, outline, array, code)
            for outline, array in zip(outlines, tensors.values(), strict=True)
        ]
        writer.flush()
        body_bytes = body.tell()
        try:
            header = header_bytes(network, outlines, body_bytes)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"the network of a .fcz file has to be JSON: {error}") from error
        file_bytes = len(header) + body_bytes
        needed, allowed = sum(outline.num_bytes for outline in outlines), allowed_bytes(file_bytes)
        if needed > allowed:
            raise RecipeError(
                f"{path}: tensors of {needed:,} bytes would be a file of {file_bytes:,}, of which "
                f"a reader allows {allowed:,}; expected a network that has weights"
            )
        body.seek(0)
        with atomic_replace(path) as aside, open(aside, "wb") as file:
            file.write(header)
            while part := body.read(COPIED):
                file.write(part)
    return FileReport(file_bytes, reports)


def _write_tensor(
    writer: BlockWriter, outline: Outline, array: NDArray[Any], code: How
) -> TensorReport:
    patterns = patterns_of(array)
    is_kept = patterns != 0
    size, kept = len(patterns), int(np.count_nonzero(is_kept))
    start = writer.bits
    writer.number(kept, size + 1)
    view = _write_positions(writer, is_kept, outline.shape, code) if 0 < kept < size else None
    mask_bits = writer.bits - start
    distinct, codebook_bits, symbol_bits, floor = 0, 0.0, 0.0, 0.0
    if kept:
        values = patterns if kept == size else patterns[is_kept]
        near = (view.matrix(patterns, outline.shape), view.distance) if view else ()
        cost = write_values(writer, KeptValues(values, outline.dtype == "float32", code, *near))
        distinct, codebook_bits, symbol_bits = cost.distinct, cost.codebook_bits, cost.symbol_bits
        floor = cost.floor_bits / 8
    return TensorReport(
        outline.name,
        outline.shape,
        outline.dtype,
        size,
        kept,
        distinct,
        mask_bits / 8,
        codebook_bits / 8,
        symbol_bits / 8,
        floor + entropy_bytes(np.array([kept, size - kept])),
    )


def _write_positions(
    writer: BlockWriter, is_kept: NDArray[np.bool_], shape: tuple[int, ...], code: How
) -> View | None:
    """Write positions, and return the view of a mask with neighbors, else None."""
    # A gain measured on a part must be clear, because masks are slower than distances.
    clear = 1.0 if len(is_kept) <= TRIED else CLEAR
    enough = clear * bits_of_gaps(is_kept[:TRIED], code)
    cheapest = (
        None if code == "huffman" else cheapest_view(is_kept, shape, enough, writer.near_rows)
    )
    if cheapest is None or enough <= cheapest[1]:
        writer.number(GAPS, 2)
        write_gaps(writer, np.flatnonzero(is_kept), len(is_kept), code)
        return None
    view, _ = cheapest
    writer.number(MASK, 2)
    write_mask(writer, view, is_kept, shape)
    return view if view.distance else None


def outline_of(name: str, array: NDArray[Any]) -> Outline:
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in DTYPES:
        raise RecipeError(f"{name} is of {array.dtype}; a .fcz file has {', '.join(DTYPES)}")
    if array.ndim > MAX_DIMENSIONS or len(name.encode()) > MAX_NAME:
        raise RecipeError(
            f"{name:.80} has {array.ndim} dimensions and a name of {len(name.encode())} bytes; a "
            f".fcz file has at most {MAX_DIMENSIONS} and {MAX_NAME}"
        )
    return Outline(name, dtype, tuple(array.shape))
