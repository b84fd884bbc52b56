"""Files that may be anyone's: read if they are regular and no longer than is said; and written
whole or not at all: aside, synced, then renamed.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

MOST_BYTES = 16_000_000
"""Size of a recipe, or of one of a run's JSON files, that is read at most."""


def cache_folder() -> Path:
    """The user's folder for what can be obtained again. Raises: RuntimeError without a home."""
    return Path.home() / ".cache" / "firecaffe"


class GrowingFile:
    """Bytes at the end of a file, in it as soon as they are written, by any thread.

    If the disk is full they wait until there is room, for what goes on does not end for that.
    """

    def __init__(self, path: Path, goes_on: bool = False) -> None:
        """goes_on: whether the file is there, and what it holds stays."""
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
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def close(self) -> None:
        self._file.close()


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside, for a file that gets its final name, on the disk, if the block comes to its
    end, and is gone if it does not. It ends as the final one does.

    Raises: OSError; before the block if a device or a pipe has the final name, which a file would
    replace.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "is no regular file, and would be replaced", str(path))
    aside = new_aside(path.with_name(f".partial.{path.name}"))
    try:
        yield aside
        sync_file(aside)
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that under its final name it is never seen in part. Names of files
    that are no UTF-8 are written as the bytes that they are.
    """
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="surrogateescape")


def new_aside(path: Path) -> Path:
    """Makes an empty file to be written and renamed. What lies there under the name, left by a
    process that was killed, or a link that somebody has put there, is removed and never followed.

    Raises: OSError.
    """
    remove_aside(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return path


def remove_aside(path: Path) -> None:
    """Removes a file, a link or a whole folder, if there is one. Raises: OSError; also if it is a
    device or a pipe, which nobody has left there by writing.
    """
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
    """Opens a file to be read. A pipe or a device might never end, or never begin.

    Raises: OSError if it is no regular file.
    """
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
    """All of a file. Raises: OSError; ValueError if it is longer than that."""
    with open_regular(path) as file:
        data = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(data) > most_bytes:
        raise ValueError(f"longer than {most_bytes} bytes")
    return data


def read_small(path: Path) -> str:
    """A text file of which nobody may want much memory: it may be a stranger's.

    Raises: OSError; ValueError if it is too long or no UTF-8.
    """
    return read_bytes(path, MOST_BYTES).decode("utf-8")


def read_lines(path: Path, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
    """The lines of a file, one in memory at a time, with their ends; a last one may have none.

    Raises: OSError; ValueError if a line is longer than that.
    """
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
    """The value with null for numbers that JSON does not have: a loss may be NaN, an interval of
    one run is endless.
    """
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A block that one process at a time is in, of those that ask for the folder. The lock goes
    with its process. Raises: OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Waits until a file's content is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until a folder's names are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
