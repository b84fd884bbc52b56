"""Kept positions as the bits of a matrix, each with a chance of its own (`density.py`).

A tensor is looked at as a matrix whose rows come one after the other: its first dimensions make the
rows, or the columns. Kept and not kept may change places. First come the classes of all rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.blocks import BlockReader, BlockWriter
from firecaffe.compression.fcz.damaged import DamagedError
from firecaffe.compression.fcz.density import FACTORS, Density, classes_of
from firecaffe.compression.fcz.sequence import read_sequence, write_sequence

STRENGTHS = 16
"""a is a power of two from 1/4 up to 2^13."""

MOST_ROWS, MOST_COLUMNS = 1 << 16, 1 << 12
LEAST_COLUMNS = (2, 32)
"""Of the matrices that are tried, without neighbors and with: each row takes time."""

MOST_DISTANCE = 64
MOST_NEAR_ROWS = 1 << 14
"""Rows of a matrix whose rows look at neighbors, and so go one by one."""

MOST_NEAR_ROWS_OF_FILE = 1 << 18
"""The same of all of a file's tensors, for each row takes time, and a stranger's may be many."""

LEAST_GROUPS, MOST_GROUP = 64, 4096
"""Rows that look at no neighbors go in groups: so few rows that there are so many groups, and at
most so many elements unless that is less than a row.
"""

TRIED = 1 << 18
"""Elements on which the ways to look at a tensor are compared."""

SCREENED = 1 << 16
"""The same of its matrices."""

NEAR = 1.1
"""A tensor is looked at no longer if the best of these took so many times enough bits."""

TRIED_DISTANCES = 3

_bernoulli = constriction.stream.model.Bernoulli(perfect=False)

Bools = NDArray[np.bool_]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """How a tensor is looked at as a matrix."""

    leading: int
    """The first dimensions that make the rows."""
    transposed: bool = False
    inverted: bool = False
    strength: int = 6
    """The binary logarithm of 4 a."""
    distance: int = 0
    """Of the neighbors that are looked at; 0: none."""

    def matrix(self, flat: NDArray[Any], shape: Shape) -> NDArray[Any]:
        """The flat tensor as that matrix; shares its memory."""
        rows = prod(shape[: self.leading])
        matrix = flat.reshape(rows, len(flat) // rows)
        return matrix.T if self.transposed else matrix

    def density(self, num_columns: int, share: float) -> Density:
        return Density(num_columns, share, self.a, self.distance)

    @property
    def a(self) -> float:
        return 2.0 ** (self.strength - 2)

    @property
    def most_rows(self) -> int:
        return MOST_NEAR_ROWS if self.distance else MOST_ROWS


def cheapest_view(
    kept: Bools, shape: Shape, enough: float, near_rows: int = 0
) -> tuple[View, float] | None:
    """The view that takes the fewest bits, and how many for an element; chosen step by step: the
    matrix, the neighbors, the strength. None if the tensor is too large for each matrix, or none
    is near `enough` bits at the first step.

    near_rows: those that the file has already.
    """

    def fits(view: View) -> bool:
        rows = len(view.matrix(kept, shape))
        return not view.distance or near_rows + rows <= MOST_NEAR_ROWS_OF_FILE

    inverted = 2 * int(kept.sum()) > len(kept)

    def cost(view: View, most: int = TRIED) -> float:
        return _write(BlockWriter(), view, kept, shape, most)

    screened = {view: cost(view, SCREENED) for view in _views(shape, inverted) if fits(view)}
    if not screened or min(screened.values()) > NEAR * enough:
        return None
    best = min(screened, key=screened.__getitem__)
    near = [replace(best, distance=each) for each in _distances(best, kept, shape)]
    near = [each for each in near if len(each.matrix(kept, shape)) <= each.most_rows and fits(each)]
    best = min([best, *near], key=cost)
    strengths = [replace(best, strength=each) for each in range(0, STRENGTHS, 2)]
    costs = [cost(each) for each in strengths]
    return strengths[int(np.argmin(costs))], min(costs)


def write_mask(writer: BlockWriter, view: View, kept: Bools, shape: Shape) -> None:
    """kept: of each element in order; not all, and not none."""
    writer.number(view.leading, len(shape) + 1)
    writer.number(view.transposed, 2)
    writer.number(view.inverted, 2)
    writer.number(view.strength, STRENGTHS)
    writer.number(view.distance, MOST_DISTANCE + 1)
    writer.near_rows += len(view.matrix(kept, shape)) if view.distance else 0
    _write(writer, view, kept, shape)


def read_mask(reader: BlockReader, flat: NDArray[Any], shape: Shape, kept: int) -> View:
    """Puts 1 at the kept places of a flat tensor of zeros. Raises: DamagedError."""
    view = View(
        reader.number(len(shape) + 1),
        bool(reader.number(2)),
        bool(reader.number(2)),
        reader.number(STRENGTHS),
        reader.number(MOST_DISTANCE + 1),
    )
    matrix = view.matrix(flat, shape)
    num_rows, num_columns = matrix.shape
    if num_rows > view.most_rows or num_columns > MOST_COLUMNS:
        raise DamagedError(f"a mask of {num_rows} x {num_columns}")
    reader.near_rows += num_rows if view.distance else 0
    if reader.near_rows > MOST_NEAR_ROWS_OF_FILE:
        raise DamagedError(f"more than {MOST_NEAR_ROWS_OF_FILE:,} rows look at neighbors")
    ones = len(flat) - kept if view.inverted else kept
    chunks = [each for (each,) in read_sequence(reader, 1, num_rows, len(FACTORS))]
    factors = FACTORS[np.concatenate(chunks)]
    density = view.density(num_columns, ones / len(flat))
    found = 0
    for rows in _groups(view, matrix.shape):
        bits = np.zeros((rows.stop - rows.start, num_columns), np.int32)
        if view.distance:
            contexts = density.contexts(matrix, rows.start)
            if factors[rows.start]:
                base, chances = density.of_row(factors[rows.start], contexts)
                bits[0] = reader.take(num_columns, _bernoulli, chances)
                density.count_contexts(bits[0], base, contexts)
        else:
            there = factors[rows] > 0
            chances = density.of_rows(factors[rows][there]).reshape(-1)
            bits[there] = reader.take(len(chances), _bernoulli, chances).reshape(-1, num_columns)
        density.count(bits, factors[rows])
        if view.inverted:
            bits ^= 1
        found += int(bits.sum())
        matrix[rows] = bits
    if found != kept:
        raise DamagedError(f"{found} bits for {kept} kept elements")
    return view


def _write(writer: BlockWriter, view: View, kept: Bools, shape: Shape, most: int = 0) -> float:
    """Writes the rows, and returns the bits for an element. most: elements after which to stop; 0
    for all.
    """
    start = writer.bits
    matrix = view.matrix(kept, shape)
    count = int(kept.sum())
    share = (len(kept) - count if view.inverted else count) / len(kept)
    if most:
        matrix = matrix[: max(1, most // matrix.shape[1])]
    num_columns = matrix.shape[1]
    counts = matrix.sum(axis=1)
    counts = num_columns - counts if view.inverted else counts
    classes = classes_of(counts, num_columns, share, view.a)
    write_sequence(writer, [classes], len(FACTORS), "best")
    factors = FACTORS[classes]
    density = view.density(num_columns, share)
    for rows in _groups(view, matrix.shape):
        bits = (matrix[rows] ^ view.inverted).astype(np.int32)
        if view.distance:
            contexts = density.contexts(matrix, rows.start)
            if factors[rows.start]:
                base, chances = density.of_row(factors[rows.start], contexts)
                writer.put(bits[0], _bernoulli, chances)
                density.count_contexts(bits[0], base, contexts)
        else:
            there = factors[rows] > 0
            chances = density.of_rows(factors[rows][there]).reshape(-1)
            writer.put(bits[there].reshape(-1), _bernoulli, chances)
        density.count(bits, factors[rows])
    return (writer.bits - start) / matrix.size


def _groups(view: View, shape: Shape) -> Iterator[slice]:
    rows, columns = shape
    size = max(1, min(rows // LEAST_GROUPS, MOST_GROUP // columns))
    size = 1 if view.distance else size
    return (slice(start, min(rows, start + size)) for start in range(0, rows, size))


def _views(shape: Shape, inverted: bool) -> Iterator[View]:
    """Each matrix once, without neighbors and with those of the row before."""
    known = set()
    for leading in range(len(shape)):
        rows, columns = prod(shape[:leading]), prod(shape[leading:])
        for transposed in (False, True):
            for distance in (0, 1):
                view = View(leading, transposed, inverted, distance=distance)
                fits = rows <= view.most_rows and LEAST_COLUMNS[distance] <= columns <= MOST_COLUMNS
                if (
                    fits
                    and (key := (rows, columns, transposed and rows > 1, distance)) not in known
                ):
                    known.add(key)
                    yield view
            rows, columns = columns, rows


def _distances(view: View, kept: Bools, shape: Shape) -> list[int]:
    """Those at which most rows keep the same columns."""
    matrix = view.matrix(kept, shape)
    num_rows = len(matrix)
    matrix = matrix[:, : max(1, TRIED // num_rows)]
    apart = range(2, min(MOST_DISTANCE, num_rows - 1) + 1)
    same = [float((matrix[each:] & matrix[:-each]).mean()) for each in apart]
    return [apart[place] for place in np.argsort(same)[::-1][:TRIED_DISTANCES]]
