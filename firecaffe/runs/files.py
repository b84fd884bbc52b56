"""Files that are whole or not there: written aside, synced, then renamed."""

import errno
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

MOST_BYTES = 16_000_000
"""Size of a recipe, or of one of a run's JSON files, that is read at most."""


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
    """
    aside = path.with_name(f".partial.{path.name}")
    try:
        yield aside
        sync_file(aside)
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that under its final name it is never seen in part."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def read_small(path: Path) -> str:
    """A text file of which nobody may want much memory: it may be a stranger's.

    Raises: OSError; ValueError if it is too long or no UTF-8.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"longer than {MOST_BYTES} bytes")
    return data.decode("utf-8")


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
