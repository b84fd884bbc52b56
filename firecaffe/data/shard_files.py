"""Where shards are read from: a folder, a remote address, or a copy that is kept nearby.

A folder's files are read in place, by `pread`. Of a remote address (`s3://…`, anything that fsspec
knows) each sample's range is fetched alone, so that a node moves only what its ranks need. With a
cache a shard is fetched whole when the first of its samples is asked for, checked against its
digest, and read in place from then on; the least recently used shards make room for new ones.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from firecaffe.data.shard import ShardInfo, sha256_of
from firecaffe.errors import DataError

OPEN_FILES = 256
"""That are kept open; more shards are opened as they are read."""

FREE_SHARE = 0.1
"""Of a disk, that a cache without a limit leaves free."""


class ShardFiles(Protocol):
    """The files of a data set."""

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        """Fewer bytes than asked for at the end of the file. Raises: DataError."""

    def size(self, info: ShardInfo) -> int:
        """Bytes of the file that is there. Raises: DataError."""

    def name(self, info: ShardInfo) -> str:
        """For people."""


def is_remote(root: str) -> bool:
    return "://" in root


def open_files(root: str, cache: str = "", cache_bytes: int = 0) -> ShardFiles:
    """cache: a folder to keep copies in; cache_bytes: their limit, 0 for all but FREE_SHARE of it.

    Raises: DataError where an address needs what is not installed.
    """
    files: RemoteFiles | LocalFiles = RemoteFiles(root) if is_remote(root) else LocalFiles(root)
    return CachedFiles(files, Path(cache).expanduser(), cache_bytes) if cache else files


def read_text(root: str, file: str, most_bytes: int) -> str:
    """A small file of the data set. Raises: DataError."""
    if is_remote(root):
        remote = RemoteFiles(root)
        content = remote.fetch(file, 0, most_bytes)
    else:
        try:
            with open(Path(root) / file, "rb") as opened:
                content = opened.read(most_bytes)
        except OSError as error:
            raise DataError(f"{root}/{file}: cannot be read, {error.strerror}") from error
    if len(content) == most_bytes:
        raise DataError(f"{root}/{file}: longer than {most_bytes / 1e6:g} MB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{root}/{file}: is no text") from error


class _Opened:
    """A descriptor that is closed when nobody reads from it any more."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Samples come in random order: what the system would read ahead is mostly thrown away.
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class LocalFiles:
    """Shards in a folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._opened = lru_cache(OPEN_FILES)(_Opened)

    def name(self, info: ShardInfo) -> str:
        return str(self.root / info.file)

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        try:
            opened = self._opened(self.name(info))  # held while it is read
            return os.pread(opened.descriptor, length, start)
        except OSError as error:
            raise DataError(f"{self.name(info)}: cannot be read, {error.strerror}") from error

    def size(self, info: ShardInfo) -> int:
        try:
            return os.stat(self.root / info.file).st_size
        except OSError as error:
            raise DataError(f"{self.name(info)}: cannot be read, {error.strerror}") from error

    def copy(self, info: ShardInfo, to: Path) -> None:
        try:
            shutil.copyfile(self.root / info.file, to)
        except OSError as error:
            raise DataError(f"{self.name(info)}: cannot be copied, {error.strerror}") from error


class RemoteFiles:
    """Shards at an address that fsspec knows."""

    def __init__(self, root: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise DataError(
                f"{root}: remote data need fsspec; pip install 'firecaffe[remote]'"
            ) from None
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
        return self.fetch(info.file, start, length)

    def size(self, info: ShardInfo) -> int:
        return int(self._tried(lambda: self._system.size(f"{self._path}/{info.file}")))

    def copy(self, info: ShardInfo, to: Path) -> None:
        self._tried(lambda: self._system.get_file(f"{self._path}/{info.file}", str(to)))

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # each protocol has errors of its own
            raise DataError(f"{self.root}: {type(error).__name__}: {error}") from error


class CachedFiles:
    """Copies of shards in a folder that several processes may share."""

    def __init__(self, source: LocalFiles | RemoteFiles, folder: Path, limit_bytes: int) -> None:
        self.source, self.folder, self.limit_bytes = source, folder, limit_bytes
        self._local = LocalFiles(folder)
        self._here: set[str] = set()

    def name(self, info: ShardInfo) -> str:
        return str(self.folder / _copy_of(info).file)

    def read(self, info: ShardInfo, start: int, length: int) -> bytes:
        copy = _copy_of(info)
        if copy.file not in self._here:
            self._fetch(info, self.folder / copy.file)
            self._here.add(copy.file)
        try:
            return self._local.read(copy, start, length)
        except DataError:  # another process made room
            self._fetch(info, self.folder / copy.file)
            return self._local.read(copy, start, length)

    def size(self, info: ShardInfo) -> int:
        copy = self.folder / _copy_of(info).file
        return copy.stat().st_size if copy.is_file() else self.source.size(info)

    def _fetch(self, info: ShardInfo, copy: Path) -> None:
        """Once for all processes of this host: the first one fetches, the others wait."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / f"{copy.name}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if copy.is_file() and copy.stat().st_size == info.num_bytes:
                    os.utime(copy)
                    return
                self._make_room(info.num_bytes)
                aside = copy.with_name(f"{copy.name}.partial")
                self.source.copy(info, aside)
                if sha256_of(aside) != info.sha256:
                    aside.unlink()
                    raise DataError(
                        f"{self.source.name(info)}: not what was packed (SHA-256); run "
                        "`firecaffe pack --verify` on it"
                    )
                os.replace(aside, copy)
        except OSError as error:
            raise DataError(f"data.cache {self.folder}: {error.strerror or error}") from error

    def _make_room(self, num_bytes: int) -> None:
        """Deletes copies, the least recently fetched first, until this many bytes fit."""
        copies = sorted(self.folder.glob("*.shard"), key=lambda path: path.stat().st_mtime)
        sizes = {path: path.stat().st_size for path in copies}
        held = sum(sizes.values())
        disk = shutil.disk_usage(self.folder)
        limit = self.limit_bytes or held + disk.free - int(FREE_SHARE * disk.total)
        if num_bytes > limit:
            raise DataError(
                f"data.cache {self.folder}: a shard of {num_bytes / 1e6:.4g} MB does not fit "
                f"{limit / 1e6:.4g} MB; raise data.cache_bytes or free some space"
            )
        for path in copies:
            if held + num_bytes <= limit:
                return
            path.unlink(missing_ok=True)
            held -= sizes[path]


def _copy_of(info: ShardInfo) -> ShardInfo:
    """Named by its content: data sets may share a cache, and a new packing never meets an old."""
    return ShardInfo(f"{info.sha256[:24]}.shard", info.count, info.num_bytes, info.sha256)
