"""A file, as a tar file, of which no more is read than is allowed, whatever it says of itself."""

import tarfile
from gzip import GzipFile
from typing import BinaryIO, cast

DAMAGED = (OSError, tarfile.TarError, ValueError, OverflowError, LookupError, RecursionError)
"""What `tarfile` raises of a file that is damaged."""


def limited(file: BinaryIO | GzipFile, most_bytes: int) -> BinaryIO:
    """An open file for one who asks for as much as a header claims. Once more than that has been
    read, OSError is raised.
    """
    return cast(BinaryIO, _Limited(file, most_bytes))


class _Limited:
    """What `tarfile` needs of a file."""

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
