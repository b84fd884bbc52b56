"""Whether a packed data set is what was packed, byte by byte."""

import hashlib
from collections.abc import Callable

from firecaffe.data.packed import PackedSet, read_list
from firecaffe.data.shard import ShardInfo, check_sample, read_index
from firecaffe.data.shard_files import ShardFiles, open_files
from firecaffe.errors import DataError

MOST_NAMED = 20
PIECE_BYTES = 1 << 24


def verify(root: str, done: Callable[[int], None] = lambda images: None) -> PackedSet:
    """Reads every sample of every shard, and compares lengths, indexes and checksums.

    done: called after each shard with how many images it holds. Raises: DataError if anything
    differs; it names the shards, and in each the samples.
    """
    packed = read_list(root)
    files = open_files(root)
    problems: list[str] = []
    for infos in packed.parts.values():
        for info in infos:
            problems += _check(info, files)
            done(info.count)
    if problems:
        more = len(problems) - MOST_NAMED
        shown = problems[:MOST_NAMED] + ([f"and {more} more"] if more > 0 else [])
        raise DataError("; ".join(shown))
    return packed


def _check(info: ShardInfo, files: ShardFiles) -> list[str]:
    name = files.name(info)
    try:
        size = files.size(info)
        index = read_index(lambda start, length: files.read(info, start, length), name, size)
    except DataError as error:
        return [str(error)]
    if len(index) != info.count:
        return [f"{name}: holds {len(index)} samples; the list says {info.count}"]
    if _sha256(info, files, size) == info.sha256:
        return []
    found = []
    for number in range(len(index)):
        start, end = int(index.offsets[number]), int(index.offsets[number + 1])
        try:
            content = files.read(info, start, end - start)
            checksum = int(index.checksums[number])
            check_sample(content, checksum, end - start, f"{name}, sample {number}")
        except DataError as error:
            found.append(str(error))
    return found or [
        f"{name}: its samples are whole, but it is not the shard of the list (SHA-256)"
    ]


def _sha256(info: ShardInfo, files: ShardFiles, size: int) -> str:
    sha = hashlib.sha256()
    for start in range(0, size, PIECE_BYTES):
        sha.update(files.read(info, start, PIECE_BYTES))
    return sha.hexdigest()
