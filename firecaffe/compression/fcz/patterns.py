"""Elements of any type as unsigned integers with the same bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = (
    "float32",
    "float16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex64",
)
"""The types of tensors in a file, which stores the index."""

GAPS, MASK = 0, 1

Patterns = NDArray[Any]


def unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def patterns_of(array: NDArray[Any]) -> Patterns:
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return native.reshape(-1).view(unsigned(native.dtype))
