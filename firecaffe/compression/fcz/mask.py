"""Positions of kept elements as bits of a matrix; each bit's chance is estimated from earlier rows.

      factor(row) * (kept(column) + a * m) / (rows + a)
    * (seen(context) + 8) / (expected(context) + 8)

`factor` is encoded as one of 16 classes. `kept` counts the column's kept elements in earlier rows,
`rows` is the sum of these rows' factors, m is the share kept in the whole matrix, and a is the
weight of the prior that all columns are equal. A context says which of some earlier rows kept the
same column. `seen` counts its kept elements; `expected` sums their chances without the last
quotient, rounded down to multiples of 2^-20. Doubles hold these numbers exactly, so every machine
computes the same quotients.

A tensor is viewed as a matrix: its first dimensions are the rows, or the columns. The bits may be
inverted. The classes of all rows come first.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from math import prod
from typing import Any

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import BlockReader, BlockWriter, DamagedError
from firecaffe.compression.fcz.sequence import Adaptive, read_sequence, write_sequence

FACTORS = np.array([0, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512]) / 64
"""Density of each class of rows over the average: half powers of two. Class 0: empty rows."""

AVERAGE = 9
UNIT = 2.0**-20
PRIOR = 8.0
"""The prior of a context: the initial numbers of expected and seen elements."""

Chances = NDArray[np.float64]
Places = NDArray[np.int64]


def neighbors(distance: int) -> tuple[int, ...]:
    """Return how far back the rows of the context are. A layer's lines have `distance` pixels."""
    if distance < 2:
        return (1,) * distance
    return tuple(sorted({1, distance - 1, distance, distance + 1}))


class Density:
    """The chances of elements, from the earlier rows and each row's density over the average."""

    def __init__(self, num_columns: int, share: float, a: float) -> None:
        self._kept = np.zeros(num_columns)
        self._rows = 0.0
        self._a, self._share = a, share

    def chances(self, matrix: NDArray[Any], row: int, factors: Chances) -> Chances:
        """Return the chances of rows from `row` on, (rows, columns), by their factors."""
        base = (self._kept + self._a * self._share) / (self._rows + self._a)
        return _clipped(np.multiply.outer(factors, base))

    def count(self, bits: NDArray[np.int32], factors: Chances) -> None:
        """Count the bits of the rows whose chances were returned last."""
        self._kept += bits.sum(axis=0)
        self._rows += float(factors.sum())


class NeighborDensity(Density):
    """A density of single rows that also looks at neighbors, by how often each context was 1."""

    def __init__(self, num_columns: int, share: float, a: float, distance: int) -> None:
        super().__init__(num_columns, share, a)
        self._neighbors = neighbors(distance)
        self._seen = np.zeros(1 << len(self._neighbors))
        self._expected = np.zeros_like(self._seen)

    def chances(self, matrix: NDArray[Any], row: int, factors: Chances) -> Chances:
        self._base = super().chances(matrix, row, factors)
        self._contexts = np.zeros(matrix.shape[1], np.int64)
        for place, distance in enumerate(self._neighbors):
            if distance <= row:
                self._contexts += (matrix[row - distance] != 0).astype(np.int64) << place
        lifts = (self._seen + PRIOR) / (self._expected + PRIOR)
        return _clipped(self._base * lifts[self._contexts])

    def count(self, bits: NDArray[np.int32], factors: Chances) -> None:
        super().count(bits, factors)
        whole = np.floor(self._base / UNIT) * UNIT
        self._seen += np.bincount(self._contexts, bits[0], len(self._seen))
        self._expected += np.bincount(self._contexts, whole[0], len(self._seen))


def _clipped(chances: Chances) -> Chances:
    return np.clip(chances, UNIT, 1 - UNIT, out=chances)


def classes_of(counts: NDArray[np.int64], num_columns: int, share: float, a: float) -> Any:
    """Return each row's most probable class, by a Poisson law and the frequency of each class."""
    classes = np.where(counts > 0, AVERAGE, 0).astype(np.int32)
    price = np.full(len(FACTORS), np.log2(len(FACTORS)))
    logs = np.log2(FACTORS[1:])
    before = np.cumsum(counts) - counts
    for _ in range(3):
        # The expected count of an average row, from earlier rows and their classes.
        rows = np.cumsum(FACTORS[classes]) - FACTORS[classes]
        expected = (before + a * share * num_columns) / (rows + a)
        taken = np.log2(np.e) * np.multiply.outer(expected, FACTORS[1:])
        cost = taken - np.multiply.outer(counts, logs) + price[1:]
        classes = np.where(counts > 0, 1 + cost.argmin(axis=1), 0).astype(np.int32)
        tally = np.bincount(classes, minlength=len(FACTORS)) + 0.5
        price = np.log2(tally.sum() / tally)
    return classes


STRENGTHS = 16
"""The number of possible values of a: powers of two from 1/4 to 2^13."""

MAX_ROWS, MAX_COLUMNS = 1 << 16, 1 << 12
# The minimum columns of a matrix without and with neighbors, because each row takes time.
MIN_COLUMNS = (2, 32)

MAX_DISTANCE = 64
MAX_NEAR_ROWS = 1 << 14
"""The maximum rows of a matrix with neighbors, whose rows are coded one by one."""

MAX_NEAR_ROWS_OF_FILE = 1 << 18
"""The maximum of such rows in a file, because each takes time and files may be malicious."""

MIN_GROUPS, MAX_GROUP = 64, 4096
"""Without neighbors: the fewest groups of rows, and the most elements of a group of several."""

TRIED = 1 << 18
"""The number of elements on which the codings of a tensor are compared."""

SCREENED = 1 << 16

DIGITS = 9
"""Decimals of a cost. Further ones depend on the machine, and would choose between equal views."""

MIN_SHARED = 0.003
"""Neighbors are tried only if they may save this share of the distances' bits: they take time."""

NEAR_FACTOR = 1.1
"""A mask is given up if its best matrix takes more than this many times `enough` bits."""

TRIED_DISTANCES = 3

_bernoulli = constriction.stream.model.Bernoulli(perfect=False)

Bools = NDArray[np.bool_]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    leading: int
    """The number of leading dimensions that make the rows."""
    transposed: bool = False
    inverted: bool = False
    strength: int = 6
    """The binary logarithm of 4 a."""
    distance: int = 0
    """The distance of the neighbors that are used; 0: none."""

    def matrix(self, flat: NDArray[Any], shape: Shape) -> NDArray[Any]:
        rows = prod(shape[: self.leading])
        matrix = flat.reshape(rows, len(flat) // rows)
        return matrix.T if self.transposed else matrix

    def bits(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        return (rows ^ self.inverted).astype(np.int32)

    def share(self, kept: int, size: int) -> float:
        """Return the share of bits that are 1, if `kept` elements of `size` are."""
        return (size - kept if self.inverted else kept) / size

    def density(self, num_columns: int, share: float) -> Density:
        if self.distance:
            return NeighborDensity(num_columns, share, self.a, self.distance)
        return Density(num_columns, share, self.a)

    @property
    def a(self) -> float:
        return 2.0 ** (self.strength - 2)

    @property
    def most_rows(self) -> int:
        return MAX_NEAR_ROWS if self.distance else MAX_ROWS


def cheapest_view(
    kept: Bools, shape: Shape, enough: float, near_rows: int = 0
) -> tuple[View, float] | None:
    """Return the view with the fewest bits per element, and these bits.

    It is chosen step by step: matrix, neighbors, strength. None if no matrix fits the limits, or
    none is near `enough` bits. `near_rows`: rows with neighbors that the file has already.
    """

    def fits(view: View) -> bool:
        rows = len(view.matrix(kept, shape))
        return not view.distance or near_rows + rows <= MAX_NEAR_ROWS_OF_FILE

    inverted = 2 * int(kept.sum()) > len(kept)

    @cache
    def of_part(view: View, most: int) -> float:
        return _cost(view, kept, shape, most)

    def cost(view: View, most: int = TRIED) -> float:
        return of_part(view, min(most, len(kept)))

    def may_tell(view: View) -> bool:
        if not view.distance:
            return True
        return shared_bits(view.matrix(kept, shape), view.distance) > MIN_SHARED * enough

    views = [view for view in _views(shape, inverted) if fits(view) and may_tell(view)]
    screened = {view: cost(view, SCREENED) for view in views}
    if not screened or min(screened.values()) > NEAR_FACTOR * enough:
        return None
    best = min(screened, key=screened.__getitem__)
    near = [replace(best, distance=distance) for distance in _distances(best, kept, shape)]
    near = [view for view in near if len(view.matrix(kept, shape)) <= view.most_rows]
    near = [view for view in near if fits(view) and may_tell(view)]
    best = min([best, *near], key=cost) if near else best
    best = _with_strength(best, lambda view: cost(view, SCREENED))
    return best, cost(best)


def _with_strength(view: View, cost: Callable[[View], float]) -> View:
    # Descent tries few strengths, and may miss a better minimum.
    fewest_bits = cost(view)
    for step in (2, -2):
        while 0 <= view.strength + step < STRENGTHS:
            further = replace(view, strength=view.strength + step)
            bits = cost(further)
            if bits >= fewest_bits:
                break
            view, fewest_bits = further, bits
    return view


def shared_bits(matrix: Bools, distance: int) -> float:
    """Return the mutual information, in bits, of elements of a column `distance` rows apart."""
    matrix = matrix[: max(distance + 1, SCREENED // matrix.shape[1])]
    before, after = matrix[:-distance], matrix[distance:]
    if not before.size:
        return 0.0
    both, first, second = (float(part.mean()) for part in (before & after, before, after))
    joint = np.array([[1 - first - second + both, second - both], [first - both, both]])
    alone = np.outer([1 - first, first], [1 - second, second])
    there = joint > 1e-12
    return float((joint[there] * np.log2(joint[there] / alone[there])).sum())


def _limits(shape: Shape) -> tuple[int, ...]:
    return len(shape) + 1, 2, 2, STRENGTHS, MAX_DISTANCE + 1


def write_mask(writer: BlockWriter, view: View, kept: Bools, shape: Shape) -> None:
    """Write which elements are kept. At least one is kept, and one is not."""
    for value, below in zip(astuple(view), _limits(shape), strict=True):
        writer.number(value, below)
    matrix, share = view.matrix(kept, shape), view.share(int(kept.sum()), len(kept))
    writer.near_rows += len(matrix) if view.distance else 0
    classes = _classes(view, matrix, share)
    write_sequence(writer, [classes], len(FACTORS), "best")
    for rows, chances in _coded_rows(view, matrix, classes, share):
        writer.put(view.bits(matrix[rows]).reshape(-1), _bernoulli, chances)


def read_mask(reader: BlockReader, flat: NDArray[Any], shape: Shape, kept: int) -> View:
    """Set the kept elements of a flat tensor of zeros to 1. Raises DamagedError."""
    leading, transposed, inverted, strength, distance = map(reader.number, _limits(shape))
    view = View(leading, bool(transposed), bool(inverted), strength, distance)
    matrix = view.matrix(flat, shape)
    num_rows, num_columns = matrix.shape
    if num_rows > view.most_rows or num_columns > MAX_COLUMNS:
        raise DamagedError(f"a mask of {num_rows} x {num_columns}")
    reader.near_rows += num_rows if view.distance else 0
    if reader.near_rows > MAX_NEAR_ROWS_OF_FILE:
        raise DamagedError(f"more than {MAX_NEAR_ROWS_OF_FILE:,} rows look at neighbors")
    chunks = [chunk for (chunk,) in read_sequence(reader, 1, num_rows, len(FACTORS))]
    matrix[...] = view.inverted
    share = view.share(kept, len(flat))
    for rows, chances in _coded_rows(view, matrix, np.concatenate(chunks), share):
        bits = reader.take(len(chances), _bernoulli, chances)
        matrix[rows] = bits.reshape(-1, num_columns) ^ view.inverted
    if (num_kept := np.count_nonzero(flat)) != kept:
        raise DamagedError(f"{num_kept} bits for {kept} kept elements")
    return view


def _cost(view: View, kept: Bools, shape: Shape, most: int) -> float:
    matrix, share = view.matrix(kept, shape), view.share(int(kept.sum()), len(kept))
    matrix = matrix[: max(1, most // matrix.shape[1])]
    classes = _classes(view, matrix, share)
    bits = Adaptive(len(FACTORS)).bits(np.bincount(classes, minlength=len(FACTORS)))
    for rows, chances in _coded_rows(view, matrix, classes, share):
        ones = view.bits(matrix[rows]).reshape(-1)
        bits -= float(np.log2(np.where(ones, chances, 1 - chances)).sum())
    return round(bits / matrix.size, DIGITS)


def _classes(view: View, matrix: Bools, share: float) -> Any:
    counts = matrix.sum(axis=1)
    counts = matrix.shape[1] - counts if view.inverted else counts
    return classes_of(counts, matrix.shape[1], share, view.a)


def _coded_rows(
    view: View, matrix: NDArray[Any], classes: NDArray[np.int32], share: float
) -> Iterator[tuple[slice | Places, Chances]]:
    """Yield each group's rows that are not empty, and the chances of their bits, row by row.

    They depend on the earlier rows of `matrix`, so a reader sets rows before it goes on.
    """
    factors = FACTORS[classes]
    density = view.density(matrix.shape[1], share)
    for group in _groups(view, matrix.shape):
        if classes[group].any():
            rows = group if classes[group].all() else group.start + np.flatnonzero(classes[group])
            yield rows, density.chances(matrix, group.start, factors[rows]).reshape(-1)
            density.count(view.bits(matrix[rows]), factors[rows])


def _groups(view: View, shape: Shape) -> Iterator[slice]:
    rows, columns = shape
    size = max(1, min(rows // MIN_GROUPS, MAX_GROUP // columns))
    size = 1 if view.distance else size
    return (slice(start, min(rows, start + size)) for start in range(0, rows, size))


def _views(shape: Shape, inverted: bool) -> Iterator[View]:
    known = set()
    for leading in range(len(shape)):
        rows, columns = prod(shape[:leading]), prod(shape[leading:])
        for transposed in (False, True):
            for distance in (0, 1):
                view = View(leading, transposed, inverted, distance=distance)
                fits = rows <= view.most_rows and MIN_COLUMNS[distance] <= columns <= MAX_COLUMNS
                if (
                    fits
                    and (key := (rows, columns, transposed and rows > 1, distance)) not in known
                ):
                    known.add(key)
                    yield view
            rows, columns = columns, rows


def _distances(view: View, kept: Bools, shape: Shape) -> list[int]:
    matrix = view.matrix(kept, shape)
    num_rows = len(matrix)
    matrix = matrix[:, : max(1, TRIED // num_rows)]
    apart = range(2, min(MAX_DISTANCE, num_rows - 1) + 1)
    same = [float((matrix[distance:] & matrix[:-distance]).mean()) for distance in apart]
    return [apart[place] for place in np.argsort(same)[::-1][:TRIED_DISTANCES]]
