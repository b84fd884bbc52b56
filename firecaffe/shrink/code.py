"""A trained network into a file: its numbers in as many bits as a scheme says."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz import CODES, FileReport, write
from firecaffe.compression.fold import fold_normalization
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.coded import describe, tensors_of
from firecaffe.training.load import Trained

MOST_SHARED = 1 << 16
"""Distinct values that a tensor of shared values has at most."""


def write_network(trained: Trained, scheme: Scheme, path: Path) -> FileReport:
    """Writes a run's network, and folds its normalization there if the scheme says so.

    Raises: RecipeError if a file cannot hold it.
    """
    if scheme.normalization == "fold":
        fold_normalization(trained.model)
    tensors = {
        name: _in_bits(values, scheme.biases) for name, values in tensors_of(trained.model).items()
    }
    network = describe(trained.recipe, trained.about)
    (code,) = (each for each in CODES if each == scheme.code)
    return write(path, tensors, network, code=code)


def _in_bits(values: NDArray[Any], bits: int) -> NDArray[Any]:
    """Rounds float32 numbers that a file holds one by one to float16: those of one dimension, and
    values that many weights share.
    """
    if bits == 32 or values.dtype != np.float32:
        return values
    if values.ndim > 1 and len(np.unique(values)) > MOST_SHARED:
        return values
    with np.errstate(over="ignore"):
        rounded: NDArray[np.float32] = values.astype(np.float16).astype(np.float32)
    if not np.array_equal(np.isfinite(rounded), np.isfinite(values)):
        return values
    return rounded + np.float32(0)  # -0 is no zero of a file
