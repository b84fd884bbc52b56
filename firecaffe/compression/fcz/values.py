"""The values of a tensor's kept elements: a codebook with indices, or their bytes.

The indices are a sequence, or are coded by the signs of neighbors. A neuron's weights for
neighboring pixels often have the same sign. So kept elements are coded row by row in three
contexts, each with its own counts: the sum of the neighbors' signs is below, at or above 0.

Bytes are columns of a sequence, the lowest byte first, because the bytes of a float differ: few
values of the highest byte, with sign and exponent, occur. Float32 values that are exactly float16
are stored as float16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import BlockReader, BlockWriter, DamagedError, Patterns
from firecaffe.compression.fcz.mask import neighbors
from firecaffe.compression.fcz.sequence import (
    Adaptive,
    How,
    entropy_bytes,
    read_sequence,
    write_sequence,
)

CONTEXTS = 3

Places = NDArray[np.int64]


def write_signed(writer: BlockWriter, matrix: Patterns, codebook: Patterns, distance: int) -> None:
    """Write a matrix in the view of its mask. `distance` is that of the mask's neighbors."""
    counts = [Adaptive(len(codebook)) for _ in range(CONTEXTS)]
    for row, context, columns in _parts(matrix, distance):
        symbols = np.searchsorted(codebook, matrix[row][columns]).astype(np.int32)
        counts[context].put(writer, symbols)


def read_signed(reader: BlockReader, matrix: Patterns, codebook: Patterns, distance: int) -> None:
    """Replace each 1 of the matrix by its value. Raises DamagedError."""
    counts = [Adaptive(len(codebook)) for _ in range(CONTEXTS)]
    for row, context, columns in _parts(matrix, distance):
        matrix[row, columns] = codebook[counts[context].take(reader, len(columns))]


def _parts(matrix: Patterns, distance: int) -> Iterator[tuple[int, int, Places]]:
    near = neighbors(distance)
    for row in range(len(matrix)):
        columns = np.flatnonzero(matrix[row])
        total = np.zeros(len(columns), np.int64)
        for gap in near:
            if gap <= row:
                total += _signs(matrix[row - gap][columns])
        contexts = np.sign(total) + 1
        for context in range(CONTEXTS):
            here = columns[contexts == context]
            if len(here):
                yield row, context, here


def _signs(patterns: Patterns) -> NDArray[np.int64]:
    # The highest bit is a float's sign.
    highest = patterns >> patterns.dtype.type(8 * patterns.itemsize - 1)
    return np.where(patterns == 0, 0, 1 - 2 * highest.astype(np.int64))


MAX_VALUES = 1 << 13
MAX_SIGNED = 1 << 8
"""The maximum values that are coded by signs, because each row makes models of all values."""

SAMPLED = 1 << 16
"""The number of elements that are first checked for too many distinct values."""

BYTES, CODEBOOK, SIGNED = 0, 1, 2
WAYS = 3


@dataclass(frozen=True)
class KeptValues:
    patterns: Patterns
    """The kept elements in order; at least one."""
    is_float32: bool
    how: How
    matrix: Patterns | None = None
    """The whole tensor in the view of its mask, if the mask uses neighbors."""
    distance: int = 0


@dataclass(frozen=True)
class ValuesCost:
    """The bits that were written. `distinct` is the number of distinct values, 0 if unknown."""

    distinct: int
    codebook_bits: float
    symbol_bits: float
    floor_bits: float
    """The codebook, and the entropy of the indices; bytes are their own floor."""


def write_values(writer: BlockWriter, kept: KeptValues) -> ValuesCost:
    codebook = _distinct(kept.patterns)
    if codebook is None:
        return _write_bytes(writer, kept, 0)
    ways = [CODEBOOK]
    if 4 * len(codebook) > len(kept.patterns):
        ways.append(BYTES)
    if kept.matrix is not None and 1 < len(codebook) <= MAX_SIGNED:
        ways.append(SIGNED)

    def cost(way: int) -> float:
        trial = BlockWriter()
        _write(trial, way, kept, codebook)
        return trial.bits

    return _write(writer, min(ways, key=cost) if len(ways) > 1 else CODEBOOK, kept, codebook)


def read_values(
    reader: BlockReader,
    dtype: np.dtype[Any],
    kept: int,
    is_float32: bool,
    matrix: Patterns | None,
    distance: int,
) -> Iterator[Patterns]:
    """Yield the kept elements in chunks, or put them into `matrix`, which marks them with 1."""
    way = reader.number(WAYS)
    if way == BYTES:
        yield from _read_bytes(reader, dtype, kept, is_float32)
        return
    distinct = reader.number(MAX_VALUES) + 1
    if distinct > kept:
        raise DamagedError(f"a codebook has {distinct} values for {kept} elements")
    codebook = np.concatenate(list(_read_bytes(reader, dtype, distinct, is_float32)))
    if (codebook[1:] <= codebook[:-1]).any():
        raise DamagedError("a codebook's values do not ascend")
    if way == SIGNED:
        if matrix is None or not 1 < distinct <= MAX_SIGNED:
            raise DamagedError(f"{distinct} signed values without a matrix, or too few or too many")
        read_signed(reader, matrix, codebook, distance)
        return
    for (symbols,) in read_sequence(reader, 1, kept, distinct):
        yield codebook[symbols]


def _write(writer: BlockWriter, way: int, kept: KeptValues, codebook: Patterns) -> ValuesCost:
    if way == BYTES:
        return _write_bytes(writer, kept, len(codebook))
    start = writer.bits
    writer.number(way, WAYS)
    writer.number(len(codebook) - 1, MAX_VALUES)
    _put_bytes(writer, codebook, kept.is_float32, "best")
    between = writer.bits
    symbols = np.searchsorted(codebook, kept.patterns).astype(np.int32)
    if way == SIGNED and kept.matrix is not None:
        write_signed(writer, kept.matrix, codebook, kept.distance)
    else:
        write_sequence(writer, [symbols], len(codebook), kept.how)
    floor = between - start + 8 * entropy_bytes(np.bincount(symbols))
    return ValuesCost(len(codebook), between - start, writer.bits - between, floor)


def _write_bytes(writer: BlockWriter, kept: KeptValues, distinct: int) -> ValuesCost:
    start = writer.bits
    writer.number(BYTES, WAYS)
    _put_bytes(writer, kept.patterns, kept.is_float32, kept.how)
    bits = writer.bits - start
    return ValuesCost(distinct, 0.0, bits, bits)


def _distinct(patterns: Patterns) -> Patterns | None:
    if len(np.unique(patterns[:SAMPLED])) > MAX_VALUES:
        return None
    distinct = np.unique(patterns)
    return distinct if len(distinct) <= MAX_VALUES else None


def _put_bytes(writer: BlockWriter, patterns: Patterns, is_float32: bool, how: How) -> None:
    if is_float32:
        half = _as_float16(patterns)
        writer.number(half is not None, 2)
        patterns = patterns if half is None else half
    columns = [
        ((patterns >> patterns.dtype.type(8 * place)) & patterns.dtype.type(255)).astype(np.int32)
        for place in range(patterns.itemsize)
    ]
    write_sequence(writer, columns, 256, how)


def _read_bytes(
    reader: BlockReader, dtype: np.dtype[Any], count: int, is_float32: bool
) -> Iterator[Patterns]:
    is_half = is_float32 and bool(reader.number(2))
    sent = np.dtype(np.uint16) if is_half else dtype
    for columns in read_sequence(reader, sent.itemsize, count, 256):
        patterns = columns[0].astype(sent)
        for place, column in enumerate(columns[1:], 1):
            patterns |= column.astype(sent) << sent.type(8 * place)
        if is_half:
            patterns = patterns.view(np.float16).astype(np.float32).view(np.uint32)
        yield patterns


def _as_float16(patterns: Patterns) -> Patterns | None:
    with np.errstate(over="ignore", invalid="ignore"):
        half = patterns.view(np.float32).astype(np.float16)
        same = np.array_equal(half.astype(np.float32).view(np.uint32), patterns)
    return half.view(np.uint16) if same else None
