"""HDF5Data: tensors by the names of the tops, in the files of a list.

Source: BVLC/caffe, src/caffe/layers/hdf5_data_layer.cpp and src/caffe/util/hdf5.cpp.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firecaffe.data.caffe_tops import Draws, Tops
from firecaffe.data.packed import HELD_BYTES
from firecaffe.errors import DataError
from firecaffe.files import open_regular

DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError)
"""The errors that h5py raises for a damaged file, at any access."""

FEW_BYTES, MOST_RATIO = 1 << 24, 1 << 10
"""Limits of a tensor in bytes, and per byte of its file: deflate packs no more than that."""


class Hdf5Tops:
    """Float32 tensors, a row per sample. Raises DataError if a file is damaged or shapes differ."""

    is_held = False
    is_random = False
    class_names: tuple[str, ...] = ()

    def __init__(self, files: Sequence[Path], tops: Sequence[str]) -> None:
        self.files, self.tops = files, tops
        self._opened: dict[tuple[int, Path], Any] = {}
        shapes = [self._shapes(file) for file in files]
        for file, file_shapes in zip(files, shapes, strict=True):
            for top, shape, wanted in zip(tops, file_shapes, shapes[0], strict=True):
                if shape[1:] != wanted[1:]:
                    raise DataError(
                        f"{file}: {top} is {shape}, and {wanted} in {files[0]}; expected the same "
                        "but for the rows"
                    )
        self._row_shapes = [shape[1:] for shape in shapes[0]]
        self._ends = list(accumulate(file_shapes[0][0] for file_shapes in shapes))
        self.num_bytes = 4 * sum(prod(shape) for file_shapes in shapes for shape in file_shapes)

    def __len__(self) -> int:
        return self._ends[-1]

    def in_memory(self) -> Tops:
        if self.num_bytes > HELD_BYTES:
            return self
        return HeldTensors(self.fetch(list(range(len(self))), None))

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        """Read the rows of each file in increasing order, which HDF5 requires."""
        samples_B = np.array(samples)
        of_file_B = np.array([bisect_right(self._ends, sample) for sample in samples])
        arrays = [np.empty((len(samples), *shape), np.float32) for shape in self._row_shapes]
        for number in np.unique(of_file_B):
            places = np.flatnonzero(of_file_B == number)
            start = self._ends[number - 1] if number else 0
            rows, back = np.unique(samples_B[places] - start, return_inverse=True)
            file = self.files[number]
            for to, top in zip(arrays, self.tops, strict=True):
                with _readable(file):
                    stored = self._file(file)[top]
                    taken = stored[:] if len(rows) == len(stored) else stored[rows]
                to[places] = taken[back]
        return [torch.from_numpy(array) for array in arrays]

    def _shapes(self, file: Path) -> list[tuple[int, ...]]:
        with _readable(file):
            opened = self._file(file)
            shapes = [_shape(file, opened, top) for top in self.tops]
        if len({shape[0] for shape in shapes}) > 1:
            counts = ", ".join(f"{s[0]} {top}" for top, s in zip(self.tops, shapes, strict=True))
            raise DataError(f"{file}: holds {counts}; expected as many rows of each")
        if shapes[0][0] == 0:
            raise DataError(f"{file}: holds no samples")
        return shapes

    def _file(self, path: Path) -> Any:
        key = (os.getpid(), path)
        if key not in self._opened:
            try:
                import h5py
            except ImportError:
                raise DataError(
                    f"{path}: HDF5 files need h5py; pip install 'firecaffe[hdf5]'"
                ) from None
            with _readable(path):
                open_regular(path).close()  # refuses pipes, on which HDF5's library would wait
                self._opened[key] = h5py.File(path, "r")
        return self._opened[key]


def _shape(path: Path, file: Any, top: str) -> tuple[int, ...]:
    import h5py

    if not isinstance(file.get(top, getlink=True), h5py.HardLink | NoneType):
        raise DataError(f"{path}: its {top} is a link; expected numbers in the file itself")
    stored = file.get(top)
    shape = getattr(stored, "shape", ())
    if not shape or stored.dtype.kind not in "fiu":
        names = ", ".join(map(str, file.keys())) or "nothing"
        raise DataError(
            f"{path}: holds no numbers named {top}, as the top is called, with a row for each "
            f"sample; it has {names:.200}"
        )
    if stored.external or stored.is_virtual:
        raise DataError(f"{path}: its {top} is in other files; expected numbers in the file itself")
    needed = max(4, stored.dtype.itemsize) * max(prod(shape), prod(stored.chunks or ()))
    most = max(FEW_BYTES, MOST_RATIO * path.stat().st_size)
    if needed > most:
        raise DataError(
            f"{path}: {top} would take {needed:,} bytes; at most {most:,} are read from a file of "
            f"{path.stat().st_size:,}"
        )
    return tuple(shape)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        said = " ".join(str(error).split())
        raise DataError(
            f"{path}: cannot be read as HDF5, {said or type(error).__name__}"
        ) from error


class HeldTensors:
    is_held = True
    class_names: tuple[str, ...] = ()
    is_random = False

    def __init__(self, tops: list[Tensor]) -> None:
        self.tops = tops

    def __len__(self) -> int:
        return len(self.tops[0])

    def in_memory(self) -> Tops:
        return self

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        indices_B = torch.tensor(samples)
        return [top.index_select(0, indices_B) for top in self.tops]
