"""The chance that an element of a matrix is kept, estimated from the rows before.

      factor(row) * (kept(column) + a * m) / (rows + a)
    * (seen(context) + 8) / (expected(context) + 8)

`factor` is sent, as one of 16 classes. `kept` counts the column's kept elements in the rows before,
`rows` is the sum of their factors, m is the share kept in the whole matrix, and a weighs the prior
that all columns are equal. A context says which of some rows before kept the same column. `seen`
counts its kept elements; `expected` sums their chances without the last quotient, rounded down to
multiples of 2^-20. Doubles hold these numbers exactly, so every machine computes the same
quotients.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTORS = np.array([0, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512]) / 64
"""The density of a row of each class over the average: half powers of two. A row of 0 is empty."""

AVERAGE = 9
UNIT = 2.0**-20
FIRM = 8.0
"""The prior of a context: expected and seen elements before the first."""

Chances = NDArray[np.float64]


def neighbors(distance: int) -> tuple[int, ...]:
    """Return which rows before make the context. A layer's lines have `distance` pixels."""
    if distance < 2:
        return (1,) * distance
    return tuple(sorted({1, distance - 1, distance, distance + 1}))


class Density:
    def __init__(self, num_columns: int, share: float, a: float, distance: int) -> None:
        self._kept = np.zeros(num_columns)
        self._rows = 0.0
        self._a, self._share = a, share
        self._neighbors = neighbors(distance)
        self._seen = np.zeros(1 << len(self._neighbors))
        self._expected = np.zeros_like(self._seen)

    def of_rows(self, factors: Chances) -> Chances:
        """Return the chances of rows that use no neighbors, (rows, columns)."""
        base = (self._kept + self._a * self._share) / (self._rows + self._a)
        return _clipped(np.multiply.outer(factors, base))

    def of_row(self, factor: float, contexts: NDArray[np.int64]) -> tuple[Chances, Chances]:
        base = (self._kept + self._a * self._share) / (self._rows + self._a)
        base = _clipped(factor * base)
        lifts = (self._seen + FIRM) / (self._expected + FIRM)
        return base, _clipped(base * lifts[contexts])

    def contexts(self, kept: NDArray[Any], row: int) -> NDArray[np.int64]:
        """Return the contexts of a row's elements in `kept`, whose rows before are known."""
        contexts = np.zeros(kept.shape[1], np.int64)
        for place, distance in enumerate(self._neighbors):
            if distance <= row:
                contexts += (kept[row - distance] != 0).astype(np.int64) << place
        return contexts

    def count(self, bits: NDArray[np.int32], factors: Chances) -> None:
        self._kept += bits.sum(axis=0)
        self._rows += float(factors.sum())

    def count_contexts(
        self, bits: NDArray[np.int32], base: Chances, contexts: NDArray[np.int64]
    ) -> None:
        whole = np.floor(base / UNIT) * UNIT
        self._seen += np.bincount(contexts, bits, len(self._seen))
        self._expected += np.bincount(contexts, whole, len(self._seen))


def _clipped(chances: Chances) -> Chances:
    return np.clip(chances, UNIT, 1 - UNIT, out=chances)


def classes_of(counts: NDArray[np.int64], num_columns: int, share: float, a: float) -> Any:
    """Return each row's most probable class, by Poisson's law and the frequency of each class."""
    classes = np.where(counts > 0, AVERAGE, 0).astype(np.int32)
    price = np.full(len(FACTORS), np.log2(len(FACTORS)))
    logs = np.log2(FACTORS[1:])
    before = np.cumsum(counts) - counts
    for _ in range(3):
        # The expected count of an average row, from the rows before and their classes.
        rows = np.cumsum(FACTORS[classes]) - FACTORS[classes]
        expected = (before + a * share * num_columns) / (rows + a)
        taken = np.log2(np.e) * np.multiply.outer(expected, FACTORS[1:])
        cost = taken - np.multiply.outer(counts, logs) + price[1:]
        classes = np.where(counts > 0, 1 + cost.argmin(axis=1), 0).astype(np.int32)
        tally = np.bincount(classes, minlength=len(FACTORS)) + 0.5
        price = np.log2(tally.sum() / tally)
    return classes
