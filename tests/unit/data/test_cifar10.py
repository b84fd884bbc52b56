"""CIFAR-10's binary version from a folder and from its archive."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firecaffe.data.cifar10 import ARCHIVE, BESIDE_BYTES, TEST_FILES, TRAIN_FILES, open_cifar10
from firecaffe.errors import DataError

RECORDS = 3


def content(number: int) -> bytes:
    """Record r has label (number + r) mod 10; its red, green, blue are label + 10, 20, 30."""
    records = b""
    for record in range(RECORDS):
        label = (number + record) % 10
        records += bytes([label])
        for plane in (10, 20, 30):
            records += bytes([label + plane]) * 1024
    return records


FILES = {name: content(number) for number, name in enumerate(TRAIN_FILES + TEST_FILES)}


def make_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def make_archive(
    path: Path, files: dict[str, bytes], prefix: str = "cifar-10-batches-bin/"
) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("source", ["folder", "inner folder", "archive", "folder with archive"])
def test_reads_every_form(tmp_path: Path, source: str) -> None:
    path = tmp_path
    if source == "folder":
        make_folder(tmp_path, FILES)
    elif source == "inner folder":
        make_folder(tmp_path / "cifar-10-batches-bin", FILES)
    elif source == "archive":
        path = make_archive(tmp_path / "any-name.tgz", FILES)
    else:
        make_archive(tmp_path / ARCHIVE, FILES)
    train, test = open_cifar10(path, RECORDS)
    assert (len(train), len(test), train.num_classes) == (15, 3, 10)
    assert train.targets.tolist() == [(file + row) % 10 for file in range(5) for row in range(3)]
    assert test.targets.tolist() == [5, 6, 7]
    planes = test.inputs.amin((2, 3)), test.inputs.amax((2, 3))
    expected = torch.tensor([[15, 25, 35], [16, 26, 36], [17, 27, 37]], dtype=torch.uint8)
    assert torch.equal(planes[0], expected)
    assert torch.equal(planes[1], expected)


def test_nothing_of_an_archive_reaches_the_disk(tmp_path: Path) -> None:
    """A member's folder is ignored, be it one that would lead out of here."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    path = make_archive(inside / ARCHIVE, FILES, prefix="../../")
    assert len(open_cifar10(path, RECORDS)[0]) == 15
    assert [found for found in tmp_path.rglob("*") if found.is_file()] == [path]


BAD_FILES = [
    ("data_batch_3.bin", FILES["data_batch_3.bin"][:-1], "9218 bytes long, expected 9219"),
    ("test_batch.bin", FILES["test_batch.bin"] + b"\0", "9220 bytes long, expected 9219"),
    ("data_batch_2.bin", FILES["data_batch_2.bin"][: 2 * 3073], "6146 bytes long, expected 9219"),
    ("data_batch_5.bin", bytes(3073) + b"\x0a" + bytes(6145), "label 10 of record 1, expected 0"),
    ("data_batch_1.bin", None, "cannot be read|holds no data_batch_1.bin"),
]


@pytest.mark.parametrize(("name", "data", "words"), BAD_FILES)
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_a_bad_file_is_named(
    tmp_path: Path, form: str, name: str, data: bytes | None, words: str
) -> None:
    files = {key: value for key, value in FILES.items() if key != name}
    if data is not None:
        files[name] = data
    path = (
        make_folder(tmp_path, files)
        if form == "folder"
        else make_archive(tmp_path / ARCHIVE, files)
    )
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


def changed(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:5],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-4],
        lambda whole: changed(whole, len(whole) // 2),
        lambda whole: changed(whole, -8),  # the checksum, behind all that tar looks at
    ],
)
def test_a_damaged_archive(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = make_archive(tmp_path / ARCHIVE, FILES)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        open_cifar10(path, RECORDS)
    assert str(caught.value).startswith(f"{path}: ")


def test_not_an_archive(tmp_path: Path) -> None:
    for data in (b"hello" * 1000, gzip.compress(b"hello" * 1000)):
        path = tmp_path / ARCHIVE
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"not a whole \.tar\.gz file"):
            open_cifar10(path, RECORDS)


def test_an_archive_that_has_no_end(tmp_path: Path) -> None:
    path = make_archive(tmp_path / ARCHIVE, FILES)
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content + bytes(BESIDE_BYTES)))
    with pytest.raises(DataError, match=r"not a whole \.tar\.gz file, longer than"):
        open_cifar10(path, RECORDS)
