"""What can be packed: each format gives the images and labels that were put into it."""

import tarfile
from pathlib import Path

import pytest

from firecaffe.data import pack_sources as source_module
from firecaffe.data.pack_images import Packing, PackOptions, Source
from firecaffe.data.pack_sources import open_source, part_of
from firecaffe.data.published_formats import TEST_FILES, TRAIN_FILES, open_cifar10
from firecaffe.errors import DataError, RecipeError
from tests.kit.data_photos import long_header, make_folder, photo, write_tar
from tests.unit.data.test_source import write_idx_files
from tools.caffe_goldens.data_cases import datum, pixels, raw, write_lmdb


def of_tar(folder: Path, members: dict[str, bytes]) -> Source:
    return open_source(write_tar(folder / "a.tar", members))


def contents(source: Source, part: str) -> list[tuple[bytes, str]]:
    found = source.parts[part]
    return [(found.read(i), source.classes[found.labels[i]]) for i in range(len(found))]


def test_parts_are_known_by_name() -> None:
    parts = {"train": "train", "test": "test", "validation": "validation"}
    parts |= {"ilsvrc12_val_lmdb": "validation", "shard-0001.tar": "train", "latest": "train"}
    parts |= {"carnival.tar": "train", "contest-train.tar": "train"}
    assert {name: part_of(name) for name in parts} == parts


def test_webdataset(tmp_path: Path) -> None:
    photos = [photo(number) for number in range(5)]
    write_tar(
        tmp_path / "set" / "train-0000.tar",
        {"0.jpg": photos[0], "0.cls": b"2", "1.cls": b"0\n", "1.jpg": photos[1], "1.json": b"{}"},
    )
    write_tar(tmp_path / "set" / "train-0001.tar", {"a/2.left.jpg": photos[2], "a/2.cls": b"11"})
    write_tar(tmp_path / "set" / "val-0000.tar", {"3.jpg": photos[3], "3.cls": b"1"})
    source = open_source(tmp_path / "set")
    assert source.classes == [str(number) for number in range(12)]
    assert contents(source, "train") == [(photos[0], "2"), (photos[1], "0"), (photos[2], "11")]
    assert contents(source, "validation") == [(photos[3], "1")]


@pytest.mark.parametrize(
    "names",
    [
        ["lens_0.5_1", "lens_0.5_2", "lens_1.4_1"],  # by the first dot two are one
        ["v1.0", "v1.1", "v2.0"],
        ["plain", "a.left"],
    ],
)
def test_names_with_dots(tmp_path: Path, names: list[str]) -> None:
    """Labels lie behind all images, as some tars have them."""
    members = {f"{name}.jpg": photo(number) for number, name in enumerate(names)}
    members |= {f"{name}.cls": str(number).encode() for number, name in enumerate(names)}
    source = of_tar(tmp_path, members)
    assert contents(source, "train") == [(photo(n), str(n)) for n in range(len(names))]


def test_a_folder_of_images_in_a_tar(tmp_path: Path) -> None:
    images = {"train/dog/1.jpg": photo(0), "train/cat/1.jpg": photo(1), "test/cat/2.jpg": photo(2)}
    hidden = ["train/.old/1.jpg", "train/cat/._1.jpg", "__MACOSX/train/dog/2.jpg"]
    source = of_tar(tmp_path, {"LICENSE": b"free", **images, **dict.fromkeys(hidden, b"no image")})
    assert source.classes == ["cat", "dog"]
    assert contents(source, "train") == [(photo(0), "dog"), (photo(1), "cat")]
    assert contents(source, "test") == [(photo(2), "cat")]
    (note,) = source.notes
    assert note.startswith("a.tar: 1 files are left out (1 without a suffix)")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"0.jpg": b"x"}, "0.jpg has no label"),
        ({"0.jpg": b"x", "1.cls": b"1", "1.jpg": b"y"}, "0.jpg has no 0.cls in its"),
        ({"0.jpg": b"x", "0.png": b"y", "0.cls": b"1"}, "0.jpg and .*0.png share a label"),
        ({"a.1.jpg": b"x", "a.2.jpg": b"y", "a.1.cls": b"1"}, "a.2.jpg has no a.2.cls in its"),
        ({"0.jpg": b"x", "0.cls": b"cat"}, "0.cls is 'cat'; expected a class's number"),
        ({"0.jpg": b"x", "0.cls": b"4006381333931"}, "expected a class's number below 1,000,000"),
        ({"readme.txt": b"x"}, "hold no images"),
    ],
)
def test_tars_without_labels_or_images(
    tmp_path: Path, members: dict[str, bytes], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        of_tar(tmp_path, members)


def test_class_folders_may_be_called_like_numbers(tmp_path: Path) -> None:
    members = {"007/a.jpg": photo(1), "4006381333931/a.jpg": photo(2), "\u00b2/a.jpg": photo(3)}
    source = of_tar(tmp_path, members)
    assert source.classes == ["007", "4006381333931", "\u00b2"]
    assert contents(source, "train")[1] == (photo(2), "4006381333931")


def test_parts_of_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", 2, 2)
    (folder / "test").rename(folder / "val")
    assert set(open_source(folder).parts) == {"train", "validation"}
    (folder / "validation").mkdir()
    with pytest.raises(DataError, match="holds both val and validation"):
        open_source(folder)


def test_idx_files_are_packed_as_pixels(tmp_path: Path) -> None:
    write_idx_files(tmp_path / "idx")
    source = open_source(tmp_path / "idx")
    assert (source.kind, source.shape) == ("raw", (1, 4, 4))
    assert contents(source, "train") == [(bytes(16), "0"), (bytes(16), "9")]
    with pytest.raises(RecipeError, match="its images are raw already"):
        Packing(source, tmp_path / "packed", PackOptions(resize=8), 1).run()


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(TRAIN_FILES + TEST_FILES):
        (tmp_path / name).write_bytes((bytes([number]) + bytes([number] * 3072)) * 2)
    monkeypatch.setattr(source_module, "open_cifar10", lambda path: open_cifar10(path, 2))
    source = open_source(tmp_path)
    assert (source.kind, source.shape) == ("raw", (3, 32, 32))
    assert contents(source, "train")[3] == (bytes([1] * 3072), "1")
    assert contents(source, "test")[0] == (bytes([5] * 3072), "5")


def test_caffes_lmdb_of_encoded_images(tmp_path: Path) -> None:
    labels = datum(data=photo(1), label=3, encoded=True), datum(data=photo(2), encoded=True)
    write_lmdb(tmp_path / "x_train_lmdb", labels)
    write_lmdb(tmp_path / "x_val_lmdb", [datum(data=photo(3), label=200, encoded=True)])
    source = open_source(tmp_path)
    assert source.kind == "jpeg"
    assert contents(source, "train") == [(photo(1), "3"), (photo(2), "0")]
    assert contents(source, "validation") == [(photo(3), "200")]
    assert len(source.classes) == 201


def test_caffes_lmdb_of_pixels_has_blue_first(tmp_path: Path) -> None:
    colors = pixels((3, 2, 5), 0)
    write_lmdb(tmp_path / "train", [raw(colors, 1)])
    write_lmdb(tmp_path / "test", [raw(colors, 0)])
    source = open_source(tmp_path)
    assert (source.kind, source.shape) == ("raw", (3, 2, 5))
    assert contents(source, "train") == [(colors[::-1].tobytes(), "1")]
    assert contents(open_source(tmp_path, "rgb"), "test") == [(colors.tobytes(), "0")]


def test_lmdbs_that_are_not_alike_or_no_lmdbs(tmp_path: Path) -> None:
    encoded = datum(data=photo(1), label=1, encoded=True)
    write_lmdb(tmp_path / "mixed" / "train", [raw(pixels((1, 2, 2), 0), 1), encoded])
    with pytest.raises(DataError, match="its images are not alike"):
        open_source(tmp_path / "mixed")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "data.mdb").write_bytes(b"no database" * 1000)
    with pytest.raises(DataError, match="not a whole LMDB"):
        open_source(tmp_path / "broken")


def test_tar_files_that_lie_of_a_member(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "set.tar", {"a/0.jpg": photo(0), "b/1.jpg": photo(1)})
    whole = path.read_bytes()
    path.write_bytes(whole[: 512 + 100])
    with pytest.raises(DataError, match=r"a/0\.jpg is cut|not a whole tar file"):
        open_source(path)
    huge = tarfile.TarInfo("a/0.jpg")
    huge.size = 1 << 62
    path.write_bytes(huge.tobuf(tarfile.GNU_FORMAT) + whole[512:])
    with pytest.raises(DataError, match=r"a/0\.jpg is cut"):
        open_source(path)
    write_tar(path, {"0.jpg": photo(0), "0.cls": b"1" * 65})
    with pytest.raises(DataError, match=r"0\.cls has 65 bytes; expected a number"):
        open_source(path)
    name = tarfile.TarInfo("name")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 1 << 62
    path.write_bytes(name.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(DataError):
        open_source(path)


def test_headers_of_tar_that_cost_more_than_they_are_long(tmp_path: Path) -> None:
    """They are searched by the square of their bytes, or copied for each member."""
    path = write_tar(tmp_path / "set.tar", {"a/0.jpg": photo(0), "b/1.jpg": photo(1)})
    whole = path.read_bytes()
    path.write_bytes(long_header() + whole)
    with pytest.raises(DataError, match="a header of 32,768 bytes"):
        open_source(path)
    name = tarfile.TarInfo("name")
    name.type, name.size = tarfile.XGLTYPE, 1 << 15
    path.write_bytes(name.tobuf() + b"12 path=c/d\n".ljust(name.size, b"\0") + whole)
    assert open_source(path).parts["train"].names == ["set.tar:a/0.jpg", "set.tar:b/1.jpg"]


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "notes").mkdir()
    with pytest.raises(DataError, match="nothing in it can be packed"):
        open_source(tmp_path / "notes")


def test_pixels_of_another_size_than_they_say_are_left_out(tmp_path: Path) -> None:
    cut = datum(channels=1, height=2, width=2, data=b"123", label=1)
    write_lmdb(tmp_path / "train", [raw(pixels((1, 2, 2), 0), 0), cut])
    packed = Packing(open_source(tmp_path), tmp_path / "packed", PackOptions(), 1).run()
    assert packed.count("train") == 1
    assert packed.skipped == ("train:00000001_name: 3 bytes of pixels, expected 4",)
