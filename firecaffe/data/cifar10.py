"""CIFAR-10 in its binary version (https://www.cs.toronto.edu/~kriz/cifar.html).

A file is a row of 3073-byte records: the label, then 32 x 32 red, green and blue values. Five files
of 10,000 records make the training set, one the test set. An archive is read as a stream.
"""

import gzip
import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch

from firecaffe.data.dataset import TensorDataset
from firecaffe.data.limited import DAMAGED, limited
from firecaffe.errors import DataError
from firecaffe.files import open_regular

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
    """Open the training and the test set in an archive or a folder. Raises DataError if damaged.

    The folder holds the archive, the six files, or `cifar-10-batches-bin` with them.
    """
    file_bytes = records_per_file * _RECORD_BYTES
    if path.is_file():
        where, contents = path, _read_archive(path, file_bytes)
    else:
        inner = path / "cifar-10-batches-bin"
        where = inner if inner.is_dir() else path
        if not (where / TRAIN_FILES[0]).exists() and (path / ARCHIVE).is_file():
            where, contents = path / ARCHIVE, _read_archive(path / ARCHIVE, file_bytes)
        else:
            contents = _read_folder(where, file_bytes)
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
            tarfile.open(fileobj=(unzipped := limited(content, most_bytes)), mode="r|") as archive,
        ):
            for member in archive:
                name = PurePosixPath(member.name).name
                if name not in TRAIN_FILES + TEST_FILES or not member.isfile():
                    continue
                _check_size(f"{path}: {member.name}", member.size, file_bytes)
                file = archive.extractfile(member)
                assert file is not None  # it is None only for members that are not files
                contents[name] = file.read()
            # gzip checks its checksum only at its end, and tar stops reading before that.
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
