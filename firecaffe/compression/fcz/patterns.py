"""Elements of any type as whole numbers without a sign that have the same bits."""

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
"""The types that a file may have; its byte is the place here."""

GAPS, MASK = 0, 1
"""How a tensor's kept positions are sent."""

Patterns = NDArray[Any]
"""Of the bits of elements: an unsigned type."""


def unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def patterns_of(array: NDArray[Any]) -> Patterns:
    """The elements' bits in order, one after the other."""
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return native.reshape(-1).view(unsigned(native.dtype))
