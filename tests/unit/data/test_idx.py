"""idx files, good ones and each kind of bad one."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firecaffe.data.idx import open_idx, read_idx, read_idx_pair
from firecaffe.errors import DataError


def idx(*sizes: int, data: bytes, magic: int | None = None) -> bytes:
    """A file as the format's description says, by struct."""
    number = 0x800 + len(sizes) if magic is None else magic
    return struct.pack(f">{1 + len(sizes)}I", number, *sizes) + data


IMAGES = idx(3, 2, 4, data=bytes(range(24)))
LABELS = idx(3, data=bytes([9, 0, 5]))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def label(value: object) -> str:
    """Names of the cases: what is expected, not the bytes, which gzip dates."""
    return value if isinstance(value, str) else "file"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_what_was_written(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    images = write(tmp_path / "images", pack(IMAGES))
    labels = write(tmp_path / "labels", pack(LABELS))
    dataset = read_idx_pair(images, labels, 10)
    assert dataset.sample_CHW == (1, 2, 4)
    assert dataset.inputs.flatten().tolist() == list(range(24))
    assert dataset.targets.tolist() == [9, 0, 5]


def test_opens_a_folder_with_plain_and_gzipped_files(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        write(tmp_path / f"{part}-images-idx3-ubyte", IMAGES)
        write(tmp_path / f"{part}-labels-idx1-ubyte.gz", gzip.compress(LABELS))
    train, test = open_idx(tmp_path, 10)
    assert len(train) == len(test) == 3


def test_a_gzip_file_of_several_members(tmp_path: Path) -> None:
    path = write(tmp_path / "f.gz", gzip.compress(IMAGES[:20]) + gzip.compress(IMAGES[20:]))
    assert read_idx(path, 3).shape == (3, 2, 4)


def test_no_memory_is_taken_on_a_header_s_word(tmp_path: Path) -> None:
    """Neither of 2^96 bytes, nor of zeros that a few bytes of gzip stand for."""
    path = write(tmp_path / "f.gz", gzip.compress(idx(2**32 - 1, 2**32 - 1, 2**32 - 1, data=b"x")))
    with pytest.raises(DataError, match=r"holds 79,228,162,458,.* bytes; of a file of 27 at most"):
        read_idx(path, 3)
    path = write(path, gzip.compress(idx(1 << 26, data=bytes(1 << 26))))
    with pytest.raises(
        DataError, match=r"holds 67,108,864 bytes; of a file of .* at most 33,554,432"
    ):
        read_idx(path, 1)


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes long, expected an idx header of 16"),
        (IMAGES[:10], "10 bytes long"),
        (IMAGES[:-1], "23 bytes after the header, expected 24 for 3 x 2 x 4"),
        (IMAGES + b"\0", "more bytes after the header, expected 24"),
        (LABELS + bytes(9), "magic number is 0x00000801, expected 0x00000803"),
        (idx(3, 2, 4, data=bytes(24), magic=0xD03), "magic number is 0x00000d03"),
        (gzip.compress(IMAGES[:-1]), "23 bytes after the header"),
        (gzip.compress(IMAGES + b"\0"), "more bytes"),
        (gzip.compress(IMAGES)[:-9], "cannot be read"),
        (gzip.compress(IMAGES)[:-4], "cannot be read"),
        (gzip.compress(IMAGES)[:5], "cannot be read"),
        (changed(gzip.compress(IMAGES), -8), "CRC"),
        (changed(gzip.compress(IMAGES), 10), "cannot be read"),
        (None, "there is no such file"),
    ],
    ids=label,
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_idx(path, 3)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("images", "labels", "named", "words"),
    [
        (IMAGES, idx(2, data=b"\0\1"), "labels", "2 labels, expected 3, the number of images in"),
        (IMAGES, idx(3, data=bytes([0, 10, 3])), "labels", "label 10 of sample 1"),
        (idx(0, 2, 4, data=b""), idx(0, data=b""), "images", "holds no images"),
        (idx(3, 0, 4, data=b""), LABELS, "images", "holds no images"),
    ],
    ids=label,
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, images: bytes, labels: bytes, named: str, words: str
) -> None:
    paths = [
        write(tmp_path / "images", images),
        write(tmp_path / "labels", labels),
    ]
    with pytest.raises(DataError, match=words) as caught:
        read_idx_pair(paths[0], paths[1], 10)
    assert str(caught.value).startswith(f"{tmp_path / named}: ")


def test_what_was_read_can_be_written_to(tmp_path: Path) -> None:
    pixels = read_idx(write(tmp_path / "f", IMAGES), 3)
    pixels += 1
    assert pixels.dtype == torch.uint8
