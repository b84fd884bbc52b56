"""The idx format of MNIST and Fashion-MNIST, plain or gzipped.

A file is a header of big-endian 32-bit integers, then unsigned bytes, the last dimension fastest:
magic (0x00000800 + number of dimensions), one size per dimension, data. Source: the format's
description on the MNIST page (LeCun, Cortes, Burges).
"""

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from firecaffe.data.dataset import TensorDataset
from firecaffe.errors import DataError
from firecaffe.files import open_regular

FEW_BYTES, MOST_RATIO = 1 << 25, 64
"""Limits of a file's content against gzip bombs: in bytes, and per byte of the file."""

_UNSIGNED_BYTES = 0x800
_CHUNK_BYTES = 1 << 20


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    with open_regular(path) as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if zipped else file


def _read(file: BinaryIO, num_bytes: int) -> bytearray:
    # Memory grows with the file's content, not with the header's claim.
    content = bytearray()
    while len(content) < num_bytes:
        chunk = file.read(min(_CHUNK_BYTES, num_bytes - len(content)))
        if not chunk:
            break
        content += chunk
    return content


def read_idx_bytes(path: Path, num_dims: int) -> tuple[bytearray, tuple[int, ...]]:
    """Read a whole file, unzipped and with its header, and return it with its sizes.

    Raises DataError if it is missing, damaged, or differs from `num_dims` or its header's sizes.
    """
    header_bytes = 4 + 4 * num_dims
    try:
        with _open(path) as file:
            content = _read(file, header_bytes)
            if len(content) < header_bytes:
                raise DataError(
                    f"{path}: {len(content)} bytes long, expected an idx header of {header_bytes}"
                )
            magic, *sizes = (
                int.from_bytes(content[at : at + 4], "big") for at in range(0, header_bytes, 4)
            )
            if magic != _UNSIGNED_BYTES + num_dims:
                raise DataError(
                    f"{path}: magic number is 0x{magic:08x}, expected "
                    f"0x{_UNSIGNED_BYTES + num_dims:08x} (idx, unsigned bytes, {num_dims} dims)"
                )
            data_bytes = math.prod(sizes)
            most = max(FEW_BYTES, MOST_RATIO * path.stat().st_size)
            if data_bytes > most:
                raise DataError(
                    f"{path}: says that it holds {data_bytes:,} bytes; of a file of "
                    f"{path.stat().st_size:,} at most {most:,} are read"
                )
            # Read one byte more than expected: this detects a longer file, and gzip checks its
            # checksum only at the end.
            content += _read(file, data_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read, {_reason(error)}") from error
    found_bytes = len(content) - header_bytes
    if found_bytes != data_bytes:
        amount = str(found_bytes) if found_bytes < data_bytes else "more"
        raise DataError(
            f"{path}: {amount} bytes after the header, expected {data_bytes} "
            f"for {' x '.join(map(str, sizes))}"
        )
    return content, tuple(sizes)


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return str(getattr(error, "strerror", None) or error)


def read_idx(path: Path, num_dims: int) -> Tensor:
    content, sizes = read_idx_bytes(path, num_dims)
    if 0 in sizes:
        return torch.empty(sizes, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * num_dims).view(sizes)


def read_idx_pair(images_path: Path, labels_path: Path, num_classes: int) -> TensorDataset:
    """Read gray images as N x 1 x H x W, and labels. Raises DataError if they do not match."""
    images_NHW = read_idx(images_path, 3)
    labels_N = read_idx(labels_path, 1)
    if len(images_NHW) != len(labels_N):
        raise DataError(
            f"{labels_path}: {len(labels_N)} labels, expected {len(images_NHW)}, "
            f"the number of images in {images_path}"
        )
    if images_NHW.numel() == 0:
        raise DataError(f"{images_path}: holds no images, expected at least one")
    try:
        return TensorDataset(images_NHW.unsqueeze(1), labels_N, num_classes)
    except DataError as error:
        raise DataError(f"{labels_path}: {error}") from error


def open_idx(folder: Path, num_classes: int) -> tuple[TensorDataset, TensorDataset]:
    """Open the training and test set of an MNIST-like set: four files, each plain or `.gz`."""

    def path(name: str) -> Path:
        return folder / name if (folder / name).exists() else folder / f"{name}.gz"

    train, test = (
        read_idx_pair(
            path(f"{part}-images-idx3-ubyte"), path(f"{part}-labels-idx1-ubyte"), num_classes
        )
        for part in ("train", "t10k")
    )
    return train, test
