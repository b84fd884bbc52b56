"""Packing of images into shards, in a fixed random order, and verification of the shards.

The same source and options give the same bytes for any number of threads. An interrupted packing
resumes: each shard that exists is complete. `packing.json` identifies the packing until
`dataset.json` replaces it.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Lock
from typing import TypedDict

import numpy as np
import simplejpeg
import torch

from firecaffe.data.dataset import BrokenSampleError, shape_text
from firecaffe.data.decode import (
    DEEP_BITS,
    UPRIGHT,
    bits_of,
    decode,
    orientation,
    scale,
    scale_shorter_side,
    with_orientation,
)
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.packed import LIST, PackedSet, read_list
from firecaffe.data.shard import ShardInfo, ShardWriter, read_index, read_sample
from firecaffe.data.shard_files import LocalFiles, ShardFiles, open_files
from firecaffe.errors import DataError, RecipeError
from firecaffe.files import sha256_of, write_atomically
from firecaffe.resume_advice import option
from firecaffe.schema import read_file

MAX_CLASSES = 1_000_000
PACKING_FILE = "packing.json"
QUALITY = 90
"""The JPEG quality of images that are encoded again."""


class PackingRecord(TypedDict):
    identity: str


@dataclass(frozen=True)
class Part:
    names: list[str]
    labels: list[int]
    sizes: list[int]
    """The approximate size of each image in bytes."""
    read: Callable[[int], bytes]
    """Function that reads one image, called by several threads. Raises DataError if it cannot."""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Source:
    kind: str
    """The kind of images: jpeg (encoded images), or raw (pixels of one shape)."""
    shape: tuple[int, ...]
    classes: list[str]
    parts: dict[str, Part]
    about: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PackOptions:
    """Options of a packing. `raw` stores pixels. `quality` 0 keeps bytes that need no resizing.

    `resize` is the shorter side of larger images, or both sides of raw ones; 0 keeps the size.
    """

    resize: int = 0
    quality: int = 0
    raw: bool = False
    shard_bytes: int = 256_000_000


@dataclass
class ImagesSeen:
    least: tuple[int, int] = (1 << 30, 1 << 30)
    most: tuple[int, int] = (0, 0)  # rows and columns
    turned: int = 0
    """Images stored as pixels whose EXIF data say that they must be rotated."""
    deep: int = 0
    """Images with 16 bits per value that are encoded again."""
    _lock: Lock = field(default_factory=Lock)

    def add(
        self, shape: tuple[int, ...], *, is_turned: bool = False, is_deep: bool = False
    ) -> None:
        _, rows, columns = shape
        with self._lock:
            self.least = min(self.least[0], rows), min(self.least[1], columns)
            self.most = max(self.most[0], rows), max(self.most[1], columns)
            self.turned += is_turned
            self.deep += is_deep

    @property
    def notes(self) -> list[str]:
        counts = {
            f"{self.turned} images say (EXIF) that they are to be turned; their pixels are kept as "
            "they are stored, without that": self.turned,
            f"{self.deep} images have 16 bits a value; they are kept as 8, of which 255 stands for "
            "65,535": self.deep,
        }
        return [line for line, count in counts.items() if count]


@dataclass
class Packing:
    source: Source
    folder: Path
    options: PackOptions
    threads: int
    done: Callable[[int], None] = lambda images: None
    """Called for each finished shard with the number of its images."""
    seen: ImagesSeen = field(default_factory=ImagesSeen)
    broken: list[str] = field(default_factory=list)
    _ended: Event = field(default_factory=Event)

    def run(self) -> PackedSet:
        """Pack or resume. Raises DataError if it fails, RecipeError for wrong options or folder."""
        _ = self.stored_as  # raises before anything is written
        self._begin()
        with open(self.folder / PACKING_FILE, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RecipeError(f"{self.folder}: another pack writes there") from None
            return self._pack()

    def _pack(self) -> PackedSet:
        parts = {}
        try:
            with ThreadPoolExecutor(self.threads, thread_name_prefix="pack") as pool:
                try:
                    for name, part in self.source.parts.items():
                        jobs = [
                            pool.submit(self._shard, f"{name}-{number:05d}.shard", part, samples)
                            for number, samples in enumerate(self._cut(part))
                        ]
                        parts[name] = tuple(job.result() for job in jobs)
                except BaseException:
                    self._ended.set()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        except OSError as error:
            raise DataError(f"{self.folder}: {error.strerror}; what is there stays") from error
        return self._finish(parts)

    @cached_property
    def stored_as(self) -> tuple[str, tuple[int, ...]]:
        source, options = self.source, self.options
        if source.kind == "raw":
            if options.resize or options.quality or options.raw:
                raise RecipeError(
                    f"{source.about}: its images are raw already; leave out {option('resize')}, "
                    f"{option('quality')} and {option('raw')}"
                )
            return "raw", source.shape
        if options.raw and options.quality:
            raise RecipeError(f"{option('raw')} keeps pixels, which have no quality; leave one out")
        if not options.raw:
            return "jpeg", ()
        if options.resize:
            return "raw", (3, options.resize, options.resize)
        for part in source.parts.values():
            for number in range(len(part)):
                with suppress(BrokenSampleError):
                    return "raw", tuple(decode(part.read(number)).shape)
        raise DataError(f"{source.about}: holds no whole image")

    def _cut(self, part: Part) -> list[list[int]]:
        order = hash64(0, Stream.PACK, torch.arange(len(part))).argsort().tolist()
        shards: list[list[int]] = []
        held = 0
        for number in order:
            if not shards or held + part.sizes[number] > self.options.shard_bytes:
                shards.append([])
                held = 0
            shards[-1].append(number)
            held += part.sizes[number]
        return shards

    def _identity(self) -> str:
        sha = hashlib.sha256(
            repr((self.options, self.source.kind, self.source.classes, self.source.about)).encode()
        )
        for name, part in self.source.parts.items():
            sha.update(repr((name, part.names, part.labels, part.sizes)).encode())
        return sha.hexdigest()

    def _begin(self) -> None:
        under_way, identity = self.folder / PACKING_FILE, self._identity()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / LIST).exists():
                raise RecipeError(
                    f"{self.folder}: holds a packed data set already; remove it first"
                )
            if under_way.exists():
                if read_file(under_way, PackingRecord, DataError)["identity"] != identity:
                    raise RecipeError(
                        f"{self.folder}: holds shards of another packing (other images or options) "
                        "that was not finished; remove it first"
                    )
                return
            if any(self.folder.iterdir()):
                raise RecipeError(f"{self.folder}: is not empty; give an empty folder, or none")
            write_atomically(under_way, json.dumps({"identity": identity}))
        except OSError as error:
            raise DataError(f"{self.folder}: {error.strerror}") from error

    def _shard(self, name: str, part: Part, samples: list[int]) -> ShardInfo:
        path = self.folder / name
        finished = self._finished_shard(path)
        if finished is None:
            with ShardWriter(path, *self.stored_as) as writer:
                for sample in samples:
                    if self._ended.is_set():
                        raise DataError("ended")
                    try:
                        content = self._stored(part.read(sample))
                    except BrokenSampleError as error:
                        writer.skipped.append(f"{part.names[sample]}: {error}")
                    else:
                        writer.add(content, part.labels[sample])
                finished = writer.finish(), tuple(writer.skipped)
        info, skipped = finished
        self.broken += skipped
        self.done(info.count)
        return info

    def _finished_shard(self, path: Path) -> tuple[ShardInfo, tuple[str, ...]] | None:
        if not path.exists():
            return None
        size = path.stat().st_size
        info = ShardInfo(path.name, 0, size, "")
        index = read_index(partial(LocalFiles(path.parent).read, info), str(path), size)
        return ShardInfo(path.name, len(index), size, sha256_of(path)), index.skipped

    def _stored(self, content: bytes) -> bytes:
        kind, shape = self.stored_as
        if self.source.kind == "raw":
            self.seen.add(shape)
            return content
        image, options, turned = decode(content), self.options, orientation(content)
        is_deep = bits_of(content) == DEEP_BITS
        if kind == "raw":
            if options.resize:
                image = scale(image, options.resize, options.resize)
            if image.shape != shape:
                raise BrokenSampleError(
                    f"{shape_text(image.shape[1:])} pixels, and others {shape_text(shape[1:])}; "
                    "give --resize"
                )
            self.seen.add(image.shape, is_turned=turned != UPRIGHT, is_deep=is_deep)
            return image.contiguous().numpy().tobytes()
        is_larger = 0 < options.resize < min(image.shape[1:])
        if is_larger:
            image = scale_shorter_side(image, options.resize)
        is_kept = not is_larger and not options.quality
        self.seen.add(image.shape, is_deep=is_deep and not is_kept)
        if is_kept:
            return content
        pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
        try:
            encoded: bytes = simplejpeg.encode_jpeg(
                pixels, options.quality or QUALITY, "RGB", colorsubsampling="420"
            )
        except ValueError as error:  # more than 65,500 rows or columns
            raise BrokenSampleError(f"cannot be a JPEG: {error}") from error
        return encoded if turned == UPRIGHT else with_orientation(encoded, turned)

    def _finish(self, parts: dict[str, tuple[ShardInfo, ...]]) -> PackedSet:
        broken = tuple(sorted(self.broken))
        classes, about = tuple(self.source.classes), self.source.about
        packed = PackedSet(*self.stored_as, classes, parts, about, broken)
        for name in parts:
            if not packed.count(name):
                broken_of_part = [line for line in broken if line.startswith(f"{name}/")] or broken
                why = f"; the first: {broken_of_part[0]}" if broken_of_part else ""
                raise DataError(f"{self.folder}: no image of {name} could be packed{why}")
        write_atomically(self.folder / LIST, packed.to_json())
        (self.folder / PACKING_FILE).unlink()
        return packed


MAX_NAMED = 20
PIECE_BYTES = 1 << 24


def verify(root: str, done: Callable[[int], None] = lambda images: None) -> PackedSet:
    """Compare all lengths, indexes and checksums. Raises DataError, which names what differs."""
    packed = read_list(root)
    files = open_files(root)
    problems: list[str] = []
    for infos in packed.parts.values():
        for info in infos:
            problems += _check(info, files)
            done(info.count)
    if problems:
        more = len(problems) - MAX_NAMED
        shown = problems[:MAX_NAMED] + ([f"and {more} more"] if more > 0 else [])
        raise DataError("; ".join(shown))
    return packed


def _check(info: ShardInfo, files: ShardFiles) -> list[str]:
    name = files.name(info)
    try:
        size, read = files.size(info), partial(files.read, info)
        index = read_index(read, name, size)
    except DataError as error:
        return [str(error)]
    if len(index) != info.count:
        return [f"{name}: holds {len(index)} samples; the list says {info.count}"]
    if _sha256(info, files, size) == info.sha256:
        return []
    problems = []
    for number in range(len(index)):
        try:
            read_sample(read, index, number, f"{name}, sample {number}")
        except DataError as error:
            problems.append(str(error))
    return problems or [
        f"{name}: its samples are whole, but it is not the shard of the list (SHA-256)"
    ]


def _sha256(info: ShardInfo, files: ShardFiles, size: int) -> str:
    sha = hashlib.sha256()
    for start in range(0, size, PIECE_BYTES):
        sha.update(files.read(info, start, PIECE_BYTES))
    return sha.hexdigest()
