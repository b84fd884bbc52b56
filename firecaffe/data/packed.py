"""A packed data set. Opening reads only `dataset.json`; shard indexes are read on first use."""

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import TypeVar

import torch
from torch import Tensor

from firecaffe.data.decode import EncodedSubset, StoredSet
from firecaffe.data.shard import (
    KINDS,
    VERSION,
    ShardIndex,
    ShardInfo,
    least_bytes,
    read_index,
    read_sample,
)
from firecaffe.data.shard_files import ShardFiles, read_text
from firecaffe.errors import DataError
from firecaffe.schema import Positive, decoded
from firecaffe.user_code import shown

T = TypeVar("T")

LIST = "dataset.json"
MAX_LIST_BYTES = 100_000_000
HELD_BYTES = 512_000_000
"""Raw data sets up to this size are read into memory when opened."""

KEPT_INDEXES = 4096
"""The number of shard indexes held in memory: enough for 256 GB in shards of 64 MB."""


@dataclass(frozen=True)
class PackedSet:
    kind: str
    shape: tuple[Positive, ...]
    classes: tuple[str, ...]
    parts: dict[str, tuple[ShardInfo, ...]]
    source: str
    skipped: tuple[str, ...]
    """The damaged images that were left out, and why."""

    def to_json(self) -> str:
        parts = {name: [asdict(info) for info in infos] for name, infos in self.parts.items()}
        content = {**asdict(self), "parts": parts}
        return json.dumps({"format": "firecaffe", "version": VERSION, **content}, indent=1) + "\n"

    def count(self, part: str) -> int:
        return sum(info.count for info in self.parts[part])


@dataclass(frozen=True)
class _Listed(PackedSet):
    format: str
    version: int


def read_list(root: str) -> PackedSet:
    text = read_text(root, LIST, MAX_LIST_BYTES)
    try:
        listed = decoded(text, _Listed)
    except ValueError as error:
        raise DataError(f"{root}/{LIST}: is damaged ({error})") from error
    if (listed.format, listed.version) != ("firecaffe", VERSION):
        raise DataError(
            f"{root}/{LIST}: is of {listed.format:.40} version {listed.version}; this reads "
            f"firecaffe version {VERSION}"
        )
    if listed.kind not in KINDS or len(listed.shape) != (3 if listed.kind == "raw" else 0):
        raise DataError(
            f"{root}/{LIST}: kind {shown(listed.kind)} with shape {list(listed.shape)!s:.40}; "
            "expected jpeg without a shape, or raw with channels, rows and columns"
        )
    for info in chain.from_iterable(listed.parts.values()):
        if info.num_bytes < least_bytes(info.count, listed.shape):
            raise DataError(
                f"{root}/{LIST}: is damaged ({info.file} of {info.num_bytes:,} bytes cannot hold "
                f"{info.count:,} samples)"
            )
    return PackedSet(
        listed.kind, listed.shape, listed.classes, listed.parts, listed.source, listed.skipped
    )


class PackedPart:
    """Stored samples of one part. Raises DataError if a shard is missing or has another length."""

    def __init__(self, packed: PackedSet, part: str, files: ShardFiles) -> None:
        self.infos = packed.parts[part]
        self.num_classes = len(packed.classes)
        self.class_names = packed.classes
        self.shard_counts = tuple(info.count for info in self.infos)
        self.kind, self.shape = packed.kind, packed.shape
        self.files = files
        self._ends = list(accumulate(self.shard_counts))
        for info in self.infos:
            size = files.size(info)
            if size != info.num_bytes:
                how = "truncated" if size < info.num_bytes else "longer than it was"
                raise DataError(
                    f"{files.name(info)}: {size} bytes long, {how}; it was packed with "
                    f"{info.num_bytes}"
                )
        if not len(self):
            raise DataError(f"{part}: the packed data set has no image in it")
        # Wrapped here, not as a decorated method, so that each part has its own cache.
        self._index = lru_cache(KEPT_INDEXES)(self._read_index)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read_index(self, shard: int) -> ShardIndex:
        info, files = self.infos[shard], self.files
        read = partial(read_index, partial(files.read, info), files.name(info), info.num_bytes)
        index = self._read_again(info, read)
        if (len(index), index.kind, index.shape) != (info.count, self.kind, self.shape):
            raise DataError(
                f"{files.name(info)}: holds {len(index)} samples of {index.kind} "
                f"{list(index.shape)}; the list says {info.count} of {self.kind} "
                f"{list(self.shape)}"
            )
        if len(index) and int(index.labels.max()) >= self.num_classes:
            raise DataError(
                f"{files.name(info)}: has label {index.labels.max()}, expected 0 to "
                f"{self.num_classes - 1}"
            )
        return index

    def place(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample}, expected 0 to {len(self) - 1}")
        shard = bisect_right(self._ends, sample)
        return shard, sample - self._ends[shard] + self.shard_counts[shard]

    def name(self, sample: int) -> str:
        shard, number = self.place(sample)
        return f"{self.files.name(self.infos[shard])}, sample {number}"

    def label(self, sample: int) -> int:
        shard, number = self.place(sample)
        return int(self._index(shard).labels[number])

    def labels(self, samples_B: Tensor) -> Tensor:
        return torch.tensor(
            [self.label(sample) for sample in samples_B.tolist()], dtype=torch.int64
        )

    def read(self, sample: int) -> bytes:
        """Read one sample. Raises DataError if its bytes are not those that were packed."""
        shard, number = self.place(sample)
        info, index = self.infos[shard], self._index(shard)
        read = partial(self.files.read, info)
        return self._read_again(info, partial(read_sample, read, index, number, self.name(sample)))

    def _read_again(self, info: ShardInfo, read: Callable[[], T]) -> T:
        try:
            return read()
        except DataError:  # perhaps only this host's cached copy is damaged
            self.files.drop_damaged(info)
            return read()

    def image_bytes(self) -> float:
        return sum(info.num_bytes for info in self.infos) / len(self)


class RawPart(StoredSet):
    def subset(self, samples_N: Tensor) -> "RawPart":
        return RawPart(EncodedSubset(self.source, samples_N), self.sample_CHW)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        read = b"".join(self.source.read(sample) for sample in indices_B.tolist())
        images = torch.frombuffer(bytearray(read), dtype=torch.uint8) if read else torch.empty(0)
        try:
            images_BCHW = images.to(torch.uint8).view(len(indices_B), *self.sample_CHW)
        except RuntimeError as error:
            raise DataError(
                f"{self.source.name(int(indices_B[0]))}: samples are not {self.sample_CHW}"
            ) from error
        return images_BCHW, self.source.labels(indices_B)
