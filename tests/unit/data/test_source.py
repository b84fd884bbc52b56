"""Data sets by name: every row of the table opens, every wrong request is answered in one line."""

import gzip
import struct
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from firecaffe.data import (
    DATASETS,
    DataConfig,
    check_data,
    data_home,
    is_images,
    open_data,
    sources,
)
from firecaffe.data.generated import generate
from firecaffe.data.packing.pack_images import Packing, PackOptions
from firecaffe.data.packing.source import open_source
from firecaffe.data.published_formats import TEST_FILES, TRAIN_FILES, open_cifar10
from firecaffe.errors import DataError, RecipeError


def write_idx_files(folder: Path, test_side: int = 4) -> None:
    folder.mkdir(parents=True)
    for part, side in (("train", 4), ("t10k", test_side)):
        pixels = bytes(2 * side * side)
        images = struct.pack(">4I", 0x803, 2, side, side) + pixels
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = struct.pack(">2I", 0x801, 2) + bytes([0, 9])
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def write_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in TRAIN_FILES + TEST_FILES:
        (folder / name).write_bytes(bytes(2 * 3073))


def write_images(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / part / "cat" / "1.jpg")


def write_packed(folder: Path) -> None:
    write_images(folder.parent / "unpacked")
    Packing(open_source(folder.parent / "unpacked"), folder, PackOptions(), threads=1).run()


EXPECTED = {
    "fashion-mnist": (2, 2, 10, (1, 4, 4)),
    "mnist": (2, 2, 10, (1, 4, 4)),
    "cifar10": (10, 2, 10, (3, 32, 32)),
    "folder": (1, 1, 1, (3, 16, 16)),
    "packed": (1, 1, 1, (3, 16, 16)),
    "generated": (10_000, 2_000, 10, (1, 28, 28)),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIRECAFFE_DATA", str(tmp_path / "home"))
    # The published files have 10,000 records; two are enough to be opened by name.
    monkeypatch.setattr(sources, "open_cifar10", lambda path: open_cifar10(path, 2))
    monkeypatch.setattr(sources, "generate", generate)  # all of it
    write_idx_files(tmp_path / "home" / "fashion-mnist")
    write_idx_files(tmp_path / "home" / "mnist")
    write_cifar10(tmp_path / "home" / "cifar10")
    write_images(tmp_path / "home" / "folder")
    write_packed(tmp_path / "home" / "packed")
    return tmp_path / "home"


@pytest.mark.parametrize("name", DATASETS)
def test_every_row_opens_from_the_data_home(home: Path, name: str) -> None:
    config = DataConfig(name=name, resize=16)
    check_data(config)
    data = open_data(config)
    num_train, num_test, num_classes, shape = EXPECTED[name]
    assert (len(data.train), len(data.test)) == (num_train, num_test)
    assert is_images(data.train)
    assert is_images(data.test)
    assert (data.train.num_classes, data.test.num_classes) == (num_classes, num_classes)
    assert data.train.sample_CHW == data.test.sample_CHW == shape
    assert data.description.startswith(f"{name}: {num_train} training and {num_test} test images")


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "generated"])
def test_a_missing_data_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FIRECAFFE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"^{tmp_path / name}: does not exist, expected {name}; "):
        check_data(DataConfig(name=name))


def test_a_broken_first_image_is_found_by_the_check(home: Path) -> None:
    path = home / "folder" / "test" / "cat" / "1.jpg"
    path.write_text("not a jpeg")
    with pytest.raises(DataError, match=f"^{path}: not a whole image"):
        check_data(DataConfig(name="folder"))


def test_training_and_test_images_of_different_shape(tmp_path: Path) -> None:
    write_idx_files(tmp_path / "set", test_side=5)
    with pytest.raises(DataError, match="training images are 1 x 4 x 4, test images 1 x 5 x 5"):
        open_data(DataConfig(name="mnist", path=str(tmp_path / "set")))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"name": "cifar-10"}, "data.name is 'cifar-10', .*did you mean cifar10"),
        ({"name": "zzz"}, "expected one of fashion-mnist, mnist, cifar10, folder, packed, gen"),
        ({"crop": 29}, "data.crop is 29"),
        ({"name": "folder", "resize": 0}, "data.resize is 0"),
        ({"augment": "all"}, "data.augment is 'all', expected one of caf"),
        ({"order": "up"}, "data.order is 'up', expected one of samples"),
        ({"on_error": "x"}, "data.on_error is 'x', expected one of stop"),
        ({"decode_threads": -1}, "data.decode_threads is -1"),
    ],
)
def test_wrong_requests(words: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        check_data(DataConfig(**{"name": "generated", **words}))


def test_data_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("FIRECAFFE_DATA", raising=False)
    assert data_home() == Path("/home/someone/.cache/firecaffe")
    monkeypatch.setenv("FIRECAFFE_DATA", "~/data")
    assert data_home() == Path("/home/someone/data")
