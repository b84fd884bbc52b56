"""Shard files in a folder, at a remote address, or copied to a local cache.

Files in a folder are read in place, by `pread`. From a remote address (`s3://…`, anything that
fsspec knows) only the range of each sample is fetched, so a node moves only what its ranks need. A
cache copies a whole shard at its first read, checks its digest, and deletes the oldest copies.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from firecaffe.data.dataset import reading
from firecaffe.data.shard import ShardInfo
from firecaffe.errors import DataError
from firecaffe.files import create_empty, open_regular, sha256_of

OPEN_FILES = 256

FREE_SHARE = 0.1
"""Share of a disk that a cache without a limit leaves free."""

COPY_GLOB = f"{24 * '[0-9a-f]'}.shard"
"""Pattern of the names of a cache's copies. Other files there may be a data set, and are kept."""


class ShardFiles(Protocol):
    """The shard files of a data set. Its methods raise DataError if a file cannot be read."""

    def read(self, info: ShardInfo, start: int, length: int) -> bytes: ...

    def size(self, info: ShardInfo) -> int: ...

    def name(self, info: ShardInfo) -> str: ...

    def drop_damaged(self, info: ShardInfo) -> None:
        """Delete a cached copy that differs from the packed shard, if files are cached."""
        return


def is_remote(root: str) -> bool:
    return "://" in root


def open_files(root: str, cache: str = "", cache_bytes: int = 0) -> ShardFiles:
    """Open shards, with copies in `cache` if given. Raises DataError if a package is missing."""
    files: RemoteFiles | LocalFiles = RemoteFiles(root) if is_remote(root) else LocalFiles(root)
    return CachedFiles(files, Path(cache).expanduser(), cache_bytes) if cache else files


def read_text(root: str, file: str, most_bytes: int) -> str:
    """Read a small text file of the data set. Raises DataError if it is too long or not text."""
    if is_remote(root):
        content = RemoteFiles(root).fetch(file, 0, most_bytes)
    else:
        with reading(f"{root}/{file}"), open_regular(Path(root) / file) as opened:
            content = opened.read(most_bytes)
    if len(content) >= most_bytes:
        raise DataError(f"{root}/{file}: longer than {most_bytes / 1e6:g} MB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{root}/{file}: is no text") from error


class _Opened:
    def __init__(self, path: str) -> None:
        self._file = open_regular(path)
        self.descriptor = self._file.fileno()
        # Samples are read in random order, so most of what the system reads ahead is wasted.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class LocalFiles(ShardFiles):
    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self._opened = lru_cache(OPEN_FILES)(_Opened)

    def name(self, info: ShardInfo) -> str:
        return f"{self.root}/{info.file}"

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        with reading(self.name(info)):
            opened = self._opened(self.name(info))  # the reference keeps it open while reading
            return os.pread(opened.descriptor, length, start)

    def size(self, info: ShardInfo) -> int:
        with reading(self.name(info)):
            return os.stat(self.name(info)).st_size

    def copy(self, info: ShardInfo, to: Path) -> None:
        try:
            shutil.copyfile(self.name(info), to)
        except OSError as error:
            raise DataError(
                f"{self.name(info)}: cannot be copied, {error.strerror or error}"
            ) from error


class RemoteFiles(ShardFiles):
    def __init__(self, root: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise DataError(
                f"{root}: remote data need fsspec; pip install 'firecaffe[remote]'"
            ) from None
        if "::" in root:  # fsspec's `reference` runs templates in the next file
            raise DataError(
                f"{root}: is a chain of addresses (::), of which some run what files say; give one "
                "address, such as s3://bucket/folder"
            )
        self.root = root
        try:
            self._system, self._path = fsspec.core.url_to_fs(root)
        except (ValueError, ImportError) as error:
            raise DataError(f"{root}: {error}") from error

    def name(self, info: ShardInfo) -> str:
        return f"{self.root}/{info.file}"

    def fetch(self, file: str, start: int, length: int) -> bytes:
        path = f"{self._path}/{file}"
        content: bytes = self._tried(lambda: self._system.cat_file(path, start, start + length))
        return content

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        content = self.fetch(info.file, start, length)
        if len(content) > length:
            raise DataError(
                f"{self.name(info)}: {length} bytes were asked for, and {len(content)} came; the "
                "server sends no ranges, as Python's http.server; data.cache takes whole files"
            )
        return content

    def size(self, info: ShardInfo) -> int:
        return int(self._tried(lambda: self._system.size(f"{self._path}/{info.file}")))

    def copy(self, info: ShardInfo, to: Path) -> None:
        self._tried(lambda: self._system.get_file(f"{self._path}/{info.file}", str(to)))

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # each protocol raises different errors
            raise DataError(f"{self.root}: {type(error).__name__}: {error}") from error


class CachedFiles(ShardFiles):
    """Copies of shards in a folder that processes share. A lock guards fetching and deleting."""

    def __init__(self, source: LocalFiles | RemoteFiles, folder: Path, limit_bytes: int) -> None:
        self.source, self.folder, self.limit_bytes = source, folder, limit_bytes

    def name(self, info: ShardInfo) -> str:
        return str(self.folder / _copy_of(info))

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        copy = self.folder / _copy_of(info)
        with reading(copy):
            try:
                return _pread(copy, start, length)
            except FileNotFoundError:
                return self._fetch_and_read(info, copy, start, length)

    def size(self, info: ShardInfo) -> int:
        try:
            size = (self.folder / _copy_of(info)).stat().st_size
        except OSError:
            return self.source.size(info)
        return size if size == info.num_bytes else self.source.size(info)

    def drop_damaged(self, info: ShardInfo) -> None:
        copy = self.folder / _copy_of(info)
        with self._alone():
            if copy.exists() and sha256_of(copy) != info.sha256:
                copy.unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "a", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise DataError(f"data.cache {self.folder}: {error.strerror or error}") from error

    def _fetch_and_read(self, info: ShardInfo, copy: Path, start: int, length: int) -> bytes:
        with self._alone():
            if not copy.exists():  # another process may have fetched it meanwhile
                self._fetch(info, copy)
            # Still under the lock, so that no process deletes the copy before it is read.
            return _pread(copy, start, length)

    def _fetch(self, info: ShardInfo, copy: Path) -> None:
        self._make_room(info.num_bytes)
        aside = create_empty(copy.with_name(f"{copy.name}.partial"))
        try:
            self.source.copy(info, aside)
            if sha256_of(aside) != info.sha256:
                raise DataError(
                    f"{self.source.name(info)}: not what was packed (SHA-256); run "
                    "`firecaffe pack --verify` on it"
                )
            os.replace(aside, copy)
        finally:
            aside.unlink(missing_ok=True)

    # No file stays open, so a copy that is deleted frees its space at once.
    def _make_room(self, num_bytes: int) -> None:
        for left in self.folder.glob(f"{COPY_GLOB}.partial"):  # left by a process that was killed
            left.unlink(missing_ok=True)
        copies = sorted(
            ((path.stat().st_mtime, path) for path in self.folder.glob(COPY_GLOB)),
            key=lambda copy: copy[0],
        )
        sizes = {path: path.stat().st_size for _, path in copies}
        held = sum(sizes.values())
        disk = shutil.disk_usage(self.folder)
        room = max(0, held + disk.free - int(FREE_SHARE * disk.total))
        limit = self.limit_bytes or room
        if num_bytes > limit:
            raise DataError(
                f"data.cache {self.folder}: a shard of {num_bytes / 1e6:.4g} MB does not fit "
                f"{limit / 1e6:.4g} MB; raise data.cache_bytes or free some space"
            )
        for _, path in copies:
            if held + num_bytes <= limit:
                return
            path.unlink(missing_ok=True)
            held -= sizes[path]


def _pread(path: Path, start: int, length: int) -> bytes:
    with open_regular(path) as file:
        return os.pread(file.fileno(), length, start)


def _copy_of(info: ShardInfo) -> str:
    # Named by content: data sets may share a cache, and a new packing gets new names.
    return f"{info.sha256[:24]}.shard"
