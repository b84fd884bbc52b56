"""Files: written completely or not at all, read up to a limit, and locked."""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import stat
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from gzip import GzipFile
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

MAX_BYTES = 16_000_000
"""Largest recipe, or JSON file of a run, that is read, in bytes."""


def cache_folder() -> Path:
    """Return the user's folder of replaceable files. Raises RuntimeError without a home."""
    return Path.home() / ".cache" / "firecaffe"


class GrowingFile:
    """A file that threads append to, unbuffered. If the disk is full, bytes wait in memory."""

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        """Open an existing file and keep its content if `goes_on`, else create a new one."""
        self._file = FileIO(path, "a" if goes_on else "x")
        self._waiting = b""
        self._turn = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._turn:
            self._waiting += data
            try:
                while self._waiting:
                    written = self._file.write(self._waiting)
                    self._waiting = self._waiting[written:]
            except OSError as error:
                # A run does not end because the disk is full.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    error.filename = str(self._file.name)  # `write` names none
                    raise

    def close(self) -> None:
        """Write what has waited, if there is room by now, and close the file."""
        if not self._file.closed:
            self.write(b"")
        self._file.close()


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a path next to `path`, with the same ending, and rename it to `path` after the block.

    The file is synced first. It is removed if the block fails. Raises OSError; before the block if
    `path` is a device or a pipe, which the rename would replace.
    """
    _check_regular(path)
    aside = create_empty(_aside_of(path))
    try:
        yield aside
        sync_file(aside)
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename in (None, str(aside)):  # the user knows no other name than `path`
            error.filename = str(path)
            del error.filename2
        raise
    finally:
        aside.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Try whether `atomic_replace` can begin. Raises OSError."""
    _check_regular(path)
    with suppress(FileNotFoundError):
        _aside_of(path).lstat()  # its name may be too long
    # Without that name: other ranks may try the same path, or write to it.
    tempfile.TemporaryFile(dir=path.parent).close()


def _aside_of(path: Path) -> Path:
    return path.with_name(f".partial.{path.name}")


def _check_regular(path: Path) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "is no regular file, and would be replaced", str(path))


def write_atomically(path: Path, text: str) -> None:
    """Write a text whole or not at all. File names that are not UTF-8 keep their bytes."""
    with atomic_replace(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="surrogateescape")


def create_empty(path: Path) -> Path:
    """Create an empty file, in place of what a killed process left there. Raises OSError."""
    remove_if_exists(path)
    # A link that somebody puts there is not followed.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return path


def remove_if_exists(path: Path) -> None:
    """Remove a file, a link or a folder, if any. Raises OSError, also for a device or a pipe."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        path.unlink()
    else:
        raise FileExistsError(errno.EEXIST, "is no file to be written over", str(path))


def open_regular(path: Path | str) -> BufferedReader:
    """Open a regular file. Raises OSError for others: a pipe or a device might block forever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, most_bytes: int) -> bytes:
    """Read a whole file. Raises OSError; ValueError if it is longer than `most_bytes`."""
    with open_regular(path) as file:
        data = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes} bytes")
    return data


def sha256_of(path: Path | str) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(path: Path) -> str:
    """Read UTF-8 of at most MAX_BYTES. Raises OSError; ValueError if too long or not UTF-8."""
    return read_bytes(path, MAX_BYTES).decode("utf-8")


def read_lines(path: Path, most_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """Yield lines with their ends. Raises OSError; ValueError if one exceeds `most_bytes`."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise ValueError(f"line {number} is longer than {most_bytes} bytes")
            yield line


def write_json(path: Path, row: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(finite(row), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Replace NaN (a loss) and infinities (an interval of one run), which JSON lacks, by null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Let one process per folder into the block. The lock ends with the process. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def private_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a locked folder for temporary files, in `parent` or the system's, for the block.

    systemd removes unlocked ones after ten days (tmpfiles.d(5)). Those that killed processes of
    this host have left are removed here; a shared file system may not show locks of other hosts.
    Raises: OSError.
    """
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
    prefix = f"{prefix}{host}-"
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob(f"{prefix}*"):
        _remove_unlocked(left)
    with ExitStack() as stack:
        while True:
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
            folder = Path(stack.enter_context(made))
            with suppress(FileNotFoundError):  # another process removed it before it was locked
                stack.enter_context(folder_lock(folder))
                if folder.exists():
                    break
        yield folder


def _remove_unlocked(folder: Path) -> None:
    # Removes nothing on a file system without locks.
    with suppress(OSError), ExitStack() as stack:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, descriptor)
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replace_together(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Give temporary paths, and rename all files in this order, or restore the previous ones."""
    with ExitStack() as stack:
        for path in paths:
            stack.enter_context(_restored_on_error(path))
        asides = [stack.enter_context(atomic_replace(path)) for path in reversed(paths)]
        yield asides[::-1]


@contextmanager
def _restored_on_error(path: Path) -> Iterator[None]:
    was_there = path.exists()
    before = path.with_name(f".before.{path.name}")
    if path.is_file():
        before.unlink(missing_ok=True)
        try:
            os.link(path, before)
        except OSError:  # a file system without links
            shutil.copy2(path, before)
    try:
        yield
    except BaseException:
        if before.exists():
            os.replace(before, path)
        elif not was_there:
            path.unlink(missing_ok=True)
        raise
    finally:
        before.unlink(missing_ok=True)


DAMAGED = (OSError, tarfile.TarError, ValueError, OverflowError, LookupError, RecursionError)

EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
MAX_HEADER_BYTES = 1 << 14
"""Largest header of tar with a long name, of which a system takes 4,096 bytes."""


class TarHeader(tarfile.TarInfo):
    """A header of a tar file that may come from anyone.

    Python before 3.11.10 searches an extended header by the square of its bytes (CVE-2024-6232),
    and each Python copies what stands in a global one for each member.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type == tarfile.XGLTYPE:
            header.type = b"?"  # passed over, as types that are not known
        if header.type in EXTENDED and header.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        return header


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
