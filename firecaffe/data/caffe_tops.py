"""The tensors of a data layer, one for each of its tops: images and labels, or HDF5 arrays.

Source: BVLC/caffe, src/caffe/layers/hdf5_data_layer.cpp and src/caffe/util/hdf5.cpp.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from firecaffe.data.caffe_layers import Transformer
from firecaffe.data.caffe_records import ImageRecords, Pixels, Record
from firecaffe.data.decode import decode_threads, thread_parts
from firecaffe.data.packed import HELD_BYTES
from firecaffe.errors import DataError
from firecaffe.files import open_regular

Draws = list[list[int]] | None
"""Random numbers of `caffe_layers.draws`, per sample. None: no random transform."""


class Tops(Protocol):
    is_held: bool = False
    is_random: bool = False
    """Whether draws change the samples."""
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int: ...

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        """Return a tensor per top, a row per sample. Raises DataError, which names the damage."""

    def in_memory(self) -> "Tops":
        """Return a copy in memory if shapes are equal and it takes at most 512 MB, else self."""
        return self


class ImageTops(Tops):
    """Images, float32 of BCHW, and labels, int64 of B. Raises DataError if image 0 does not fit."""

    def __init__(
        self, records: ImageRecords, transformer: Transformer, has_labels: bool, threads: int
    ) -> None:
        self.records, self.transformer, self.has_labels = records, transformer, has_labels
        self.is_random, self.class_names = transformer.is_random, records.class_names
        self.threads = decode_threads(threads) if records.is_decoded else 1
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")
        self.fetch([0], None)

    def __len__(self) -> int:
        return len(self.records)

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        first = self.records.read(samples[0])
        images_BCHW = torch.empty(len(samples), *self._shape(first, samples[0]))
        labels_B = torch.empty(len(samples), dtype=torch.int64)

        def some(places: range) -> None:
            for place in places:
                record = self.records.read(samples[place]) if place else first
                self._check_shape(record, samples[place], samples[0], images_BCHW)
                labels_B[place] = record.label
                draw = None if draws is None else draws[place]
                self.transformer.write(images_BCHW[place].numpy(), record.image_CHW, draw)

        parts = thread_parts(len(samples), self.threads)
        for _ in self._pool.map(some, parts) if self.threads > 1 else map(some, parts):
            pass
        return [images_BCHW, labels_B] if self.has_labels else [images_BCHW]

    def in_memory(self) -> Tops:
        records = self.records
        first_CHW = records.read(0).image_CHW
        if records.is_decoded or first_CHW.nbytes * len(records) > HELD_BYTES:
            return self
        images_NCHW: Pixels = np.empty((len(records), *first_CHW.shape), first_CHW.dtype)
        labels_N = torch.empty(len(records), dtype=torch.int64)
        for sample in range(len(records)):
            image_CHW, labels_N[sample] = records.read(sample)
            if image_CHW.shape != first_CHW.shape or image_CHW.dtype != first_CHW.dtype:
                return self
            images_NCHW[sample] = image_CHW
        return HeldTops(images_NCHW, labels_N, self.transformer, self.has_labels)

    def _shape(self, record: Record, sample: int) -> tuple[int, int, int]:
        try:
            return self.transformer.shape(record.image_CHW)
        except DataError as error:
            raise DataError(f"{self.records.name(sample)}: {error}") from None

    def _check_shape(self, record: Record, sample: int, first: int, images_BCHW: Tensor) -> None:
        shape, wanted = self._shape(record, sample), tuple(images_BCHW.shape[1:])
        if shape != wanted:
            raise DataError(
                f"{self.records.name(sample)}: is {shape}, and {self.records.name(first)} in the "
                f"same batch {wanted}; expected one shape: set crop_size, or new_height and "
                "new_width, or train on one sample at a time, train.micro_batch_size = 1"
            )


class HeldTops(Tops):
    is_held = True

    def __init__(
        self, images_NCHW: Pixels, labels_N: Tensor, transformer: Transformer, has_labels: bool
    ) -> None:
        self.images_NCHW, self.labels_N = images_NCHW, labels_N
        self.transformer, self.has_labels = transformer, has_labels
        self.is_random = transformer.is_random

    def __len__(self) -> int:
        return len(self.labels_N)

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        images_BCHW = self.images_NCHW[samples]
        to_BCHW = torch.empty(len(samples), *self.transformer.shape(images_BCHW[0]))
        if draws is None:
            self.transformer.write(to_BCHW.numpy(), images_BCHW, None)
        else:
            for to_CHW, image_CHW, draw in zip(to_BCHW.numpy(), images_BCHW, draws, strict=True):
                self.transformer.write(to_CHW, image_CHW, draw)
        return [to_BCHW, self.labels_N[samples]] if self.has_labels else [to_BCHW]


DAMAGED = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, MemoryError)
"""The errors that h5py raises for a damaged file, at any access."""

FEW_BYTES, MAX_RATIO = 1 << 24, 1 << 10
"""Limits of a tensor in bytes, and per byte of its file: deflate's ratio is no higher."""


class Hdf5Tops(Tops):
    """Float32 tensors, a row per sample. Raises DataError if a file is damaged or shapes differ."""

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
                open_regular(path).close()  # refuses pipes, which would block HDF5's library
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
    most = max(FEW_BYTES, MAX_RATIO * path.stat().st_size)
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


class HeldTensors(Tops):
    is_held = True

    def __init__(self, tops: list[Tensor]) -> None:
        self.tops = tops

    def __len__(self) -> int:
        return len(self.tops[0])

    def fetch(self, samples: list[int], draws: Draws) -> list[Tensor]:
        indices_B = torch.tensor(samples)
        return [top.index_select(0, indices_B) for top in self.tops]
