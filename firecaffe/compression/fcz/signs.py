"""Indices into a codebook, coded by the signs of an element's neighbors.

A neuron's weights for neighboring pixels often have the same sign. So the kept elements of a mask
are coded row by row in three contexts: the sum of the neighbors' signs is below, at or above 0.
Each context has its own counts.
"""

from collections.abc import Iterator

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.density import neighbors
from firecaffe.compression.fcz.format import BlockReader, BlockWriter
from firecaffe.compression.fcz.patterns import Patterns

CONTEXTS = 3

_categorical = constriction.stream.model.Categorical

Places = NDArray[np.int64]


class Counts:
    def __init__(self, alphabet: int) -> None:
        self._weights = np.ones((CONTEXTS, alphabet))

    def model(self, context: int) -> object:
        return _categorical(self._weights[context], perfect=False)

    def count(self, context: int, symbols: NDArray[np.int32]) -> None:
        self._weights[context] += 2 * np.bincount(symbols, minlength=self._weights.shape[1])


def write_signed(writer: BlockWriter, matrix: Patterns, codebook: Patterns, distance: int) -> None:
    """Write a matrix as viewed by its mask. `distance` is that of the mask's neighbors."""
    counts = Counts(len(codebook))
    for row, context, columns in _parts(matrix, distance):
        symbols = np.searchsorted(codebook, matrix[row][columns]).astype(np.int32)
        writer.put(symbols, counts.model(context))
        counts.count(context, symbols)


def read_signed(reader: BlockReader, matrix: Patterns, codebook: Patterns, distance: int) -> None:
    """Replace each 1 of the matrix by its value. Raises DamagedError."""
    counts = Counts(len(codebook))
    for row, context, columns in _parts(matrix, distance):
        symbols = reader.take(len(columns), counts.model(context))
        matrix[row, columns] = codebook[symbols]
        counts.count(context, symbols)


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
