"""What a file came to: where its bytes went, and how far from the entropy they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorReport:
    """One tensor's part of a file. Sizes are fractions of bytes: all go through one coder."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    """Elements."""
    kept: int
    """Elements that have other bits than 0."""
    distinct: int
    """Distinct values of the kept elements; 0 if they are too many for a codebook."""
    mask_bytes: float
    """For which elements are kept."""
    codebook_bytes: float
    symbol_bytes: float
    """For which value each kept element has; or for the values themselves."""
    floor_bytes: float
    """The entropy of kept and not kept, and that of the values, each element by itself; with the
    codebook. A mask or values with a structure may take less.
    """

    @property
    def num_bytes(self) -> float:
        return self.mask_bytes + self.codebook_bytes + self.symbol_bytes

    @property
    def bits(self) -> float:
        """Of the index of a codebook's value, if each has as many; 0 without a codebook."""
        return log2(self.distinct) if self.distinct else 0.0


@dataclass(frozen=True)
class FileReport:
    """A file that was written."""

    num_bytes: int
    """The whole file."""
    header_bytes: int
    """Of them, what comes before the first block."""
    tensors: Sequence[TensorReport]

    @property
    def raw_bytes(self) -> int:
        """The same tensors without any coding."""
        return sum(each.size * np.dtype(each.dtype).itemsize for each in self.tensors)

    @property
    def ratio(self) -> float:
        """How many times smaller than the tensors the whole file is."""
        return self.raw_bytes / self.num_bytes


def entropy_bytes(counts: NDArray[Any]) -> float:
    """Of symbols that occur so often, coded each by itself."""
    counts = counts[counts > 0]
    total = counts.sum()
    return float((counts * np.log2(total / counts)).sum()) / 8 if len(counts) else 0.0
