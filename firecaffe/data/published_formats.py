"""The files of published data sets: idx (MNIST, Fashion-MNIST), and CIFAR-10's binary version.

An idx file is a header of big-endian 32-bit integers: magic (0x00000800 + number of dimensions) and
one size per dimension; then unsigned bytes, the last dimension fastest. Source: the format's
description on the MNIST page (LeCun, Cortes, Burges).

A CIFAR-10 file is a sequence of 3073-byte records: label, then 32 x 32 red, green and blue values.
Five files of 10,000 records are the training set, one the test set. An archive is streamed.
"""

import gzip
import math
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import torch
from torch import Tensor

from firecaffe.data.dataset import TensorDataset
from firecaffe.errors import DataError
from firecaffe.files import DAMAGED, TarHeader, limited, open_regular

FEW_BYTES, MAX_RATIO = 1 << 25, 64
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
    """Return an idx file's uncompressed bytes, header included, and sizes. Raises DataError."""
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
            most = max(FEW_BYTES, MAX_RATIO * path.stat().st_size)
            if data_bytes > most:
                raise DataError(
                    f"{path}: says that it holds {data_bytes:,} bytes; of a file of "
                    f"{path.stat().st_size:,} at most {most:,} are read"
                )
            # Read one byte more than expected, to detect a longer file, and since gzip checks its
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


TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
ARCHIVE = "cifar-10-binary.tar.gz"
RECORDS_PER_FILE = 10_000
BESIDE_BYTES = 1 << 20
"""Bytes allowed in an archive in addition to the six files. Its other files have a few kB."""
_RECORD_BYTES = 1 + 3 * 32 * 32
_NUM_CLASSES = 10


def open_cifar10(
    path: Path, records_per_file: int = RECORDS_PER_FILE
) -> tuple[TensorDataset, TensorDataset]:
    """Open both sets of the archive, or of a folder of it or its files. Raises DataError."""
    file_bytes = records_per_file * _RECORD_BYTES
    inner = path / "cifar-10-batches-bin"
    where = inner if inner.is_dir() else path
    if not (where / TRAIN_FILES[0]).exists() and (path / ARCHIVE).is_file():
        where = path / ARCHIVE
    contents = (_read_archive if where.is_file() else _read_folder)(where, file_bytes)
    return _parse(where, contents, TRAIN_FILES), _parse(where, contents, TEST_FILES)


def _check_size(file: str, found_bytes: int, expected_bytes: int) -> None:
    if found_bytes != expected_bytes:
        raise DataError(
            f"{file}: {found_bytes} bytes long, expected {expected_bytes} "
            f"({expected_bytes // _RECORD_BYTES} records of {_RECORD_BYTES})"
        )


def _read_folder(folder: Path, file_bytes: int) -> dict[str, bytes]:
    contents = {}
    for name in TRAIN_FILES + TEST_FILES:
        path = folder / name
        try:
            with open_regular(path) as file:
                _check_size(str(path), os.fstat(file.fileno()).st_size, file_bytes)
                contents[name] = file.read(file_bytes)
                _check_size(str(path), len(contents[name]), file_bytes)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read, {error.strerror}; expected the files of {ARCHIVE} "
                "or the archive itself"
            ) from error
    return contents


def _read_archive(path: Path, file_bytes: int) -> dict[str, bytes]:
    contents = {}
    most_bytes = len(TRAIN_FILES + TEST_FILES) * file_bytes + BESIDE_BYTES
    try:
        with (
            open_regular(path) as zipped,
            gzip.open(zipped, "rb") as content,
            tarfile.open(
                fileobj=(unzipped := limited(content, most_bytes)), mode="r|", tarinfo=TarHeader
            ) as archive,
        ):
            for member in archive:
                name = PurePosixPath(member.name).name
                if name not in TRAIN_FILES + TEST_FILES or not member.isfile():
                    continue
                _check_size(f"{path}: {member.name}", member.size, file_bytes)
                file = archive.extractfile(member)
                assert file is not None  # it is None only for members that are not files
                contents[name] = file.read()
            # gzip checks its checksum only at its end; tar stops reading before that.
            while unzipped.read(1 << 20):
                pass
    except (EOFError, zlib.error, *DAMAGED) as error:
        raise DataError(f"{path}: not a whole .tar.gz file, {error}") from error
    missing = [name for name in TRAIN_FILES + TEST_FILES if name not in contents]
    if missing:
        raise DataError(f"{path}: holds no {missing[0]}, expected the six files of {ARCHIVE}")
    return contents


def _parse(where: Path, contents: dict[str, bytes], names: Sequence[str]) -> TensorDataset:
    records_NK = torch.frombuffer(
        bytearray(b"".join(contents[name] for name in names)), dtype=torch.uint8
    ).view(-1, _RECORD_BYTES)
    wrong = (records_NK[:, 0] >= _NUM_CLASSES).nonzero()
    if len(wrong) > 0:
        file, record = divmod(int(wrong[0]), len(records_NK) // len(names))
        raise DataError(
            f"{where}: {names[file]}: label {int(records_NK[wrong[0], 0])} of record {record}, "
            f"expected 0 to {_NUM_CLASSES - 1}"
        )
    images_NCHW = records_NK[:, 1:].reshape(-1, 3, 32, 32)
    return TensorDataset(images_NCHW, records_NK[:, 0], _NUM_CLASSES)
