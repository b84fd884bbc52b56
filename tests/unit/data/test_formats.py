"""idx files and CIFAR-10's, good ones and each kind of bad one."""

import gzip
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firecaffe.data.published_formats import (
    ARCHIVE,
    BESIDE_BYTES,
    TEST_FILES,
    TRAIN_FILES,
    open_cifar10,
    open_idx,
    read_idx,
    read_idx_pair,
)
from firecaffe.errors import DataError
from tests.kit.data_photos import long_header, write_tar


def idx(*sizes: int, data: bytes, magic: int | None = None) -> bytes:
    """A file as the format's description says, by struct."""
    number = 0x800 + len(sizes) if magic is None else magic
    return struct.pack(f">{1 + len(sizes)}I", number, *sizes) + data


IMAGES = idx(3, 2, 4, data=bytes(range(24)))
LABELS = idx(3, data=bytes([9, 0, 5]))
PAIR = {"images": IMAGES, "labels": LABELS}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def label(value: object) -> str:
    """Names of the cases: what is expected, not the bytes, which gzip dates."""
    return value if isinstance(value, str) else "file"


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_reads_what_was_written(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    images, labels = (write(tmp_path / name, pack(content)) for name, content in PAIR.items())
    dataset = read_idx_pair(images, labels, 10)
    assert dataset.sample_CHW == (1, 2, 4)
    assert dataset.inputs.flatten().tolist() == list(range(24))
    assert dataset.targets.tolist() == [9, 0, 5]
    pixels = read_idx(images, 3)
    pixels += 1  # may be written to
    assert pixels.dtype == torch.uint8


def test_opens_a_folder_with_plain_and_gzipped_files(tmp_path: Path) -> None:
    several = gzip.compress(LABELS[:9]) + gzip.compress(LABELS[9:])  # members of one file
    for part in ("train", "t10k"):
        write(tmp_path / f"{part}-images-idx3-ubyte", IMAGES)
        write(tmp_path / f"{part}-labels-idx1-ubyte.gz", several)
    train, test = open_idx(tmp_path, 10)
    assert len(train) == len(test) == 3


def test_no_memory_is_taken_on_a_header_s_word(tmp_path: Path) -> None:
    """Neither of 2^96 bytes, nor of zeros that a few bytes of gzip stand for."""
    path = write(tmp_path / "f.gz", gzip.compress(idx(2**32 - 1, 2**32 - 1, 2**32 - 1, data=b"x")))
    with pytest.raises(DataError, match=r"holds 79,228,162,458,.* bytes; of a file of 27 at most"):
        read_idx(path, 3)
    path = write(path, gzip.compress(idx(1 << 26, data=bytes(1 << 26))))
    with pytest.raises(DataError, match=r"holds 67,108,864 bytes; .* at most 33,554,432"):
        read_idx(path, 1)


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
    one, other = write(tmp_path / "images", images), write(tmp_path / "labels", labels)
    with pytest.raises(DataError, match=words) as caught:
        read_idx_pair(one, other, 10)
    assert str(caught.value).startswith(f"{tmp_path / named}: ")


RECORDS = 3


def content(number: int) -> bytes:
    """Record r has label (number + r) mod 10; its red, green, blue are label + 10, 20, 30."""
    labels = [(number + record) % 10 for record in range(RECORDS)]
    planes = [b"".join(bytes([label + plane]) * 1024 for plane in (10, 20, 30)) for label in labels]
    return b"".join(bytes([label]) + plane for label, plane in zip(labels, planes, strict=True))


BATCHES = {name: content(number) for number, name in enumerate(TRAIN_FILES + TEST_FILES)}


def make_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def make_archive(
    path: Path, files: dict[str, bytes], prefix: str = "cifar-10-batches-bin/"
) -> Path:
    return write_tar(path, {prefix + name: data for name, data in files.items()}, "w:gz")


SOURCES: dict[str, tuple[Callable[[Path, dict[str, bytes]], Path], str, str]] = {
    "folder": (make_folder, "", ""),
    "inner folder": (make_folder, "cifar-10-batches-bin", ""),
    "archive": (make_archive, "any-name.tgz", "any-name.tgz"),
    "folder with archive": (make_archive, ARCHIVE, ""),
}


@pytest.mark.parametrize("source", SOURCES)
def test_reads_every_form(tmp_path: Path, source: str) -> None:
    make, name, opened = SOURCES[source]
    make(tmp_path / name, BATCHES)
    train, test = open_cifar10(tmp_path / opened, RECORDS)
    assert (len(train), len(test), train.num_classes) == (15, 3, 10)
    assert train.targets.tolist() == [(file + row) % 10 for file in range(5) for row in range(3)]
    assert test.targets.tolist() == [5, 6, 7]
    for plane in (test.inputs.amin((2, 3)), test.inputs.amax((2, 3))):
        assert plane.tolist() == [[15, 25, 35], [16, 26, 36], [17, 27, 37]]


def test_nothing_of_an_archive_reaches_the_disk(tmp_path: Path) -> None:
    """A member's folder is ignored, be it one that would lead out of here."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    path = make_archive(inside / ARCHIVE, BATCHES, prefix="../../")
    assert len(open_cifar10(path, RECORDS)[0]) == 15
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]


BAD_FILES = [
    ("data_batch_3.bin", BATCHES["data_batch_3.bin"][:-1], "9218 bytes long, expected 9219"),
    ("test_batch.bin", BATCHES["test_batch.bin"] + b"\0", "9220 bytes long, expected 9219"),
    ("data_batch_2.bin", BATCHES["data_batch_2.bin"][: 2 * 3073], "6146 bytes long, expected 9219"),
    ("data_batch_5.bin", bytes(3073) + b"\x0a" + bytes(6145), "label 10 of record 1, expected 0"),
    ("data_batch_1.bin", None, "cannot be read|holds no data_batch_1.bin"),
]


@pytest.mark.parametrize(("name", "data", "words"), BAD_FILES)
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_a_bad_file_of_cifar10_is_named(
    tmp_path: Path, form: str, name: str, data: bytes | None, words: str
) -> None:
    files = {key: value for key, value in BATCHES.items() if key != name}
    if data is not None:
        files[name] = data
    is_folder = form == "folder"
    path = make_folder(tmp_path, files) if is_folder else make_archive(tmp_path / ARCHIVE, files)
    with pytest.raises(DataError, match=words) as caught:
        open_cifar10(path, RECORDS)
    assert str(caught.value).startswith(str(path))
    assert name in str(caught.value)


def test_a_member_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / ARCHIVE
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.type = tarfile.SYMTYPE
        member.linkname = "/etc/hostname"
        archive.addfile(member)
    with pytest.raises(DataError, match=r"holds no data_batch_1\.bin"):
        open_cifar10(path, RECORDS)


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda whole: b"", "cannot be read|not a whole"),
        (lambda whole: whole[: len(whole) // 2], "cannot be read|not a whole"),
        (lambda whole: whole[:-4], "cannot be read|not a whole"),
        (lambda whole: changed(whole, len(whole) // 2), "cannot be read|not a whole"),
        # The checksum, behind all that tar looks at.
        (lambda whole: changed(whole, -8), "cannot be read|not a whole"),
        (lambda whole: b"hello" * 1000, "not a whole"),
        (lambda whole: gzip.compress(b"hello" * 1000), "not a whole"),
        (lambda whole: gzip.compress(gzip.decompress(whole) + bytes(BESIDE_BYTES)), "longer than"),
        (lambda whole: gzip.compress(long_header() + gzip.decompress(whole)), "header of 32,768"),
    ],
)
def test_a_damaged_archive(tmp_path: Path, damage: Callable[[bytes], bytes], part: str) -> None:
    path = make_archive(tmp_path / ARCHIVE, BATCHES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"^{path}: .*({part})"):
        open_cifar10(path, RECORDS)
