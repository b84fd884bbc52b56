"""The report of a file: the use of its bytes, and their distance from the entropy."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorReport:
    """One tensor's part of a file. Sizes are fractions of bytes, because all share one coder."""

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
    """Bytes for the indices into the codebook, or for the values themselves."""
    floor_bytes: float
    """The codebook and the entropy of mask and values; those with a structure may take less."""

    @property
    def num_bytes(self) -> float:
        return self.mask_bytes + self.codebook_bytes + self.symbol_bytes

    @property
    def bits(self) -> float:
        """The bits of an index if all values are equally frequent; 0 without a codebook."""
        return log2(self.distinct) if self.distinct else 0.0


@dataclass(frozen=True)
class FileReport:
    num_bytes: int
    header_bytes: int
    tensors: Sequence[TensorReport]

    @property
    def raw_bytes(self) -> int:
        """The size of the tensors without any coding."""
        return sum(tensor.size * np.dtype(tensor.dtype).itemsize for tensor in self.tensors)

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.num_bytes


def entropy_bytes(counts: NDArray[Any]) -> float:
    counts = counts[counts > 0]
    total = counts.sum()
    return float((counts * np.log2(total / counts)).sum()) / 8 if len(counts) else 0.0
