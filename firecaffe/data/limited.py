"""A file, such as a tar file, that is not read beyond a limit, whatever its headers claim."""

import tarfile
from gzip import GzipFile
from typing import BinaryIO, cast

DAMAGED = (OSError, tarfile.TarError, ValueError, OverflowError, LookupError, RecursionError)
"""The errors that `tarfile` raises for a damaged file."""


def limited(file: BinaryIO | GzipFile, most_bytes: int) -> BinaryIO:
    """Wrap an open file so that reading more than `most_bytes` in total raises OSError."""
    return cast(BinaryIO, _Limited(file, most_bytes))


class _Limited:
    def __init__(self, file: BinaryIO | GzipFile, most_bytes: int) -> None:
        self._file, self._most, self._left = file, most_bytes, most_bytes

    def read(self, length: int = -1) -> bytes:
        asked = self._left + 1 if length < 0 else min(length, self._left + 1)
        data = self._file.read(asked)
        self._left -= len(data)
        if self._left < 0:
            raise OSError(f"longer than {self._most:,} bytes")
        return data

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()
