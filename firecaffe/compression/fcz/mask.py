"""Kept positions as the bits of a matrix, with a chance for each row and column.

In a pruned layer some inputs are hardly ever kept, and some outputs: pixels at the border of an
image, neurons that are nearly dead. A tensor is looked at as a matrix whose rows come one after
the other. A row says how dense it is, in one of 16 classes; how dense a column is, is learned
from the rows before. Either of the two may change places, and kept and not kept, too.

The chance of a bit is  factor(row) * (kept(column) + a * m) / (rows + a),  where `kept` counts the
column's kept elements in the rows before, `rows` is the sum of their factors, m the share that the
whole tensor keeps, and a the strength of the guess that all columns are alike. All of that are
whole numbers, or quotients of two, in IEEE doubles, so that every machine comes to the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.blocks import BlockReader, BlockWriter
from firecaffe.compression.fcz.damaged import DamagedError
from firecaffe.compression.fcz.sequence import read_sequence, write_sequence

FACTORS = np.array([0, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512]) / 64
"""How much denser than the average a row of each class is: halves of a power of two. A row of class
0 is empty.
"""

AVERAGE = 9
STRENGTHS = 16
"""a is a power of two from 1/4 up to 2^13."""

LEAST_CHANCE = 2.0**-20
MOST_ROWS, MOST_COLUMNS = 1 << 16, 10240
LEAST_GROUPS, MOST_GROUP = 64, 4096
"""Rows are taken in groups: so few rows that there are so many groups, and at most so many elements
unless that is less than a row.
"""

TRIED = 1 << 18
"""Elements on which the ways to look at a tensor are compared."""

_bernoulli = constriction.stream.model.Bernoulli(perfect=False)

Bits = NDArray[np.int32]


@dataclass(frozen=True)
class View:
    """How a tensor is looked at as a matrix."""

    leading: int
    """The first dimensions that make the rows."""
    transposed: bool = False
    inverted: bool = False
    strength: int = 2
    """The binary logarithm of 4 a."""

    def matrix(self, flat: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The flat tensor as that matrix; shares its memory."""
        rows = prod(shape[: self.leading])
        matrix = flat.reshape(rows, len(flat) // rows)
        return matrix.T if self.transposed else matrix

    @property
    def a(self) -> float:
        return 2.0 ** (self.strength - 2)


class Columns:
    """How dense each column is, from the rows before."""

    def __init__(self, num_columns: int, share: float, a: float) -> None:
        self._kept = np.zeros(num_columns)
        self._rows = 0.0
        self._a, self._share = a, share

    def chances(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each bit of some rows, which all count from the same rows before."""
        base = (self._kept + self._a * self._share) / (self._rows + self._a)
        chances = np.multiply.outer(factors, base).reshape(-1)
        return np.clip(chances, LEAST_CHANCE, 1 - LEAST_CHANCE, out=chances)

    def count(self, bits: Bits, factors: NDArray[np.float64]) -> None:
        self._kept += bits.sum(axis=0)
        self._rows += float(factors.sum())  # multiples of 1/64: exact in any order


def cheapest_view(kept: NDArray[np.bool_], shape: tuple[int, ...]) -> tuple[View, float] | None:
    """The view that takes the fewest bits, and how many for an element; chosen step by step: the
    matrix, then the strength. None if the tensor is too large for each matrix.
    """
    inverted = 2 * int(kept.sum()) > len(kept)
    views = [replace(each, inverted=inverted) for each in _views(shape)]
    if not views:
        return None

    def cost(view: View) -> float:
        trial = BlockWriter()
        return _write(trial, view, kept, shape, TRIED)

    best = min(views, key=cost)
    strengths = [replace(best, strength=each) for each in range(0, STRENGTHS, 2)]
    costs = [cost(each) for each in strengths]
    return strengths[int(np.argmin(costs))], min(costs)


def write_mask(
    writer: BlockWriter, view: View, kept: NDArray[np.bool_], shape: tuple[int, ...]
) -> None:
    """kept: of each element in order; not all, and not none."""
    writer.number(view.leading, len(shape) + 1)
    writer.number(view.transposed, 2)
    writer.number(view.inverted, 2)
    writer.number(view.strength, STRENGTHS)
    _write(writer, view, kept, shape)


def read_mask(reader: BlockReader, flat: NDArray[Any], shape: tuple[int, ...], kept: int) -> None:
    """Puts 1 at the kept places of a flat tensor of zeros. Raises: DamagedError."""
    view = View(
        reader.number(len(shape) + 1),
        bool(reader.number(2)),
        bool(reader.number(2)),
        reader.number(STRENGTHS),
    )
    matrix = view.matrix(flat, shape)
    _check(matrix.shape)
    ones = len(flat) - kept if view.inverted else kept
    chunks = [each for (each,) in read_sequence(reader, 1, len(matrix), len(FACTORS))]
    classes = np.concatenate(chunks)
    columns = Columns(matrix.shape[1], ones / len(flat), view.a)
    found = 0
    for group in _groups(matrix.shape):
        factors = FACTORS[classes[group]]
        there = factors > 0
        bits = np.zeros((len(factors), matrix.shape[1]), np.int32)
        chances = columns.chances(factors[there])
        bits[there] = reader.take(len(chances), _bernoulli, chances).reshape(-1, matrix.shape[1])
        columns.count(bits, factors)
        if view.inverted:
            bits ^= 1
        found += int(bits.sum())
        matrix[group] = bits
    if found != kept:
        raise DamagedError(f"{found} bits for {kept} kept elements")


def _write(
    writer: BlockWriter, view: View, kept: NDArray[np.bool_], shape: tuple[int, ...], most: int = 0
) -> float:
    """Writes the rows, and returns the bits for an element. most: elements after which to stop; 0
    for all.
    """
    start = writer.bits
    matrix = view.matrix(kept, shape) ^ view.inverted
    share = int(matrix.sum()) / matrix.size
    if most:
        matrix = matrix[: max(1, most // matrix.shape[1])]
    columns = Columns(matrix.shape[1], share, view.a)
    classes = _classes(matrix, share, view.a)
    write_sequence(writer, [classes], len(FACTORS), "best")
    for group in _groups(matrix.shape):
        factors = FACTORS[classes[group]]
        bits = matrix[group].astype(np.int32)
        there = factors > 0
        writer.put(bits[there].reshape(-1), _bernoulli, columns.chances(factors[there]))
        columns.count(bits, factors)
    return (writer.bits - start) / matrix.size


def _groups(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, columns = shape
    size = max(1, min(rows // LEAST_GROUPS, MOST_GROUP // columns))
    return (slice(start, min(rows, start + size)) for start in range(0, rows, size))


def _check(shape: tuple[int, ...]) -> None:
    if shape[0] > MOST_ROWS or shape[1] > MOST_COLUMNS:
        raise DamagedError(
            f"a mask of {shape[0]} x {shape[1]}; at most {MOST_ROWS} x {MOST_COLUMNS}"
        )


def _views(shape: tuple[int, ...]) -> Iterator[View]:
    for leading in range(1, len(shape)) if len(shape) > 1 else (0,):
        rows, columns = prod(shape[:leading]), prod(shape[leading:])
        if rows <= MOST_ROWS and columns <= MOST_COLUMNS:
            yield View(leading)
        if columns <= MOST_ROWS and rows <= MOST_COLUMNS and len(shape) > 1:
            yield View(leading, transposed=True)


def _classes(matrix: NDArray[np.bool_], share: float, a: float) -> Bits:
    """The class of each row: the most probable one, by Poisson's law and by how often each is
    taken.
    """
    counts = matrix.sum(axis=1)
    num_columns = matrix.shape[1]
    classes = np.where(counts > 0, AVERAGE, 0).astype(np.int32)
    price = np.full(len(FACTORS), log2(len(FACTORS)))
    logs = np.log2(FACTORS[1:])
    for _ in range(3):
        # What is expected of an average row, from the rows before and their classes.
        rows = np.cumsum(FACTORS[classes]) - FACTORS[classes]
        before = np.cumsum(counts) - counts
        expected = (before + a * share * num_columns) / (rows + a)
        taken = np.log2(np.e) * np.multiply.outer(expected, FACTORS[1:])
        cost = taken - np.multiply.outer(counts, logs) + price[1:]
        classes = np.where(counts > 0, 1 + cost.argmin(axis=1), 0).astype(np.int32)
        tally = np.bincount(classes, minlength=len(FACTORS)) + 0.5
        price = np.log2(tally.sum() / tally)
    return classes
