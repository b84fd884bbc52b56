"""Kept positions as distances: the number of zeros before each kept element.

For a distance of 2^b - 1 zeros or more, a symbol that skips this many is sent as often as needed,
then the rest. Source: Han, Mao and Dally 2016, section 3, where a kept zero skips.
"""

from collections.abc import Iterator
from math import inf

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import BlockReader, BlockWriter, DamagedError, Symbols
from firecaffe.compression.fcz.sequence import (
    How,
    code_lengths,
    entropy_bytes,
    read_sequence,
    write_sequence,
)

MOST_BITS = 15
TABLED = 1 << 16
"""The alphabet is chosen by this many distances."""

MOST_SKIPS = 1.25
"""The most symbols for each distance, with a range coder."""

BITS_OF_TABLE = 5
"""The approximate bits of learning a symbol's count."""


def write_gaps(writer: BlockWriter, positions: NDArray[np.int64], size: int, how: How) -> None:
    """Write the ascending positions of the kept elements, at least one, of a tensor of `size`."""
    zeros = np.diff(positions, prepend=-1) - 1
    bits = _cheapest_bits(zeros[:TABLED], how)
    symbols = _symbols(zeros, (1 << bits) - 1)
    writer.number(bits - 1, MOST_BITS)
    writer.number(len(symbols) - 1, size)
    write_sequence(writer, [symbols], 1 << bits, how)


def bits_of_gaps(part: NDArray[np.bool_], how: How) -> float:
    trial = BlockWriter()
    if part.any():
        write_gaps(trial, np.flatnonzero(part), len(part), how)
    return trial.bits / len(part)


def read_gaps(reader: BlockReader, kept: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the positions, chunk by chunk, ascending. Raises DamagedError."""
    bits = reader.number(MOST_BITS) + 1
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
        if len(symbols) > MOST_SKIPS * len(zeros) and how != "huffman":
            return inf
        counts = np.bincount(symbols)
        table = BITS_OF_TABLE * min(1 << bits, len(symbols))
        if how == "huffman":
            return float((counts * code_lengths(counts)).sum()) + table
        return 8 * entropy_bytes(counts) + table

    # Each skip takes time, so alphabets that need many are excluded.
    most = max(1, int(zeros.max()).bit_length())
    return min(range(1, min(most, MOST_BITS) + 1), key=cost)
