"""A folder of images: what it holds, a first look at it, and each way in which it can be wrong."""

import struct
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from firecaffe.cli import main
from firecaffe.data import DataConfig, Dataset, is_images, open_data
from firecaffe.data.decode import DecodedSet
from firecaffe.data.pack_sources import open_source
from firecaffe.data.sources import LOOKED_AT, evenly, open_image_folder
from firecaffe.errors import DataError
from firecaffe.training.prediction import list_files
from tests.kit.data_photos import BLUE, GREEN, RED, draw, encoded


def open_folder(path: Path, resize: int) -> tuple[Dataset, Dataset]:
    train, test, *_ = open_image_folder(DataConfig("folder", str(path), resize=resize))
    return train, test


def test_what_is_left_out_is_counted_and_said(images: Path) -> None:
    for name in ("1.HEIC", "2.heic", "3.gif"):
        (images / "train" / "b" / name).write_bytes(b"")
    (images / "train" / "a" / "more").mkdir()
    (note,) = open_image_folder(DataConfig("folder", str(images))).notes
    assert note.startswith("train: 5 files are left out")
    assert "2 .heic" in note
    assert all(part in note for part in ("1 .gif", "1 .txt", "1 folder", ".webp"))
    assert note in open_data(DataConfig("folder", str(images))).notes
    assert note in open_source(images).notes
    for path in (images / "train" / "a").glob("*.png"):
        path.rename(path.with_suffix(".tiff"))
    with pytest.raises(DataError, match=r"a: holds no images \(1 .tiff, 1 folder\), expected"):
        open_folder(images, 8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Classes b and a, two and one training images, one test image of b."""
    draw(tmp_path / "train" / "b" / "2.png", GREEN)
    draw(tmp_path / "train" / "b" / "1.PNG", RED)
    draw(tmp_path / "train" / "a" / "9.png", BLUE)
    draw(tmp_path / "val" / "b" / "x.bmp", GREEN, (30, 40))
    (tmp_path / "train" / "b" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "b" / "._1.png").write_text("left by a file manager")
    draw(tmp_path / "train" / ".hidden" / "1.png", GREEN)
    draw(tmp_path / "train" / "__MACOSX" / "b" / "1.png", GREEN)
    draw(tmp_path / "train" / "b" / ".ipynb_checkpoints" / "1.png", GREEN)
    return tmp_path


def test_predict_lists_what_a_training_reads(images: Path) -> None:
    train, _ = open_folder(images, 8)
    files, (note,) = list_files([str(images / "train")])
    assert isinstance(train, DecodedSet)
    assert sorted(map(str, files)) == sorted(map(train.source.name, range(len(train))))
    assert "1 files are left out (1 .txt)" in note


def test_classes_and_files_are_sorted(images: Path) -> None:
    train, test = open_folder(images, 8)
    assert is_images(train)
    assert is_images(test)
    assert (len(train), len(test), train.num_classes, test.num_classes) == (3, 1, 2, 2)
    assert train.sample_CHW == (3, 8, 8)
    pixels, labels = train.batch(torch.tensor([2, 0, 1, 0]))
    assert labels.tolist() == [1, 0, 1, 0]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (4, 3, 8, 8)
    colors = [tuple(image.amin((1, 2)).tolist()) for image in pixels]
    assert colors == [GREEN, BLUE, RED, BLUE]
    assert test.batch(torch.tensor([0]))[1].tolist() == [1]
    pixels, labels = train.batch(torch.tensor([], dtype=torch.int64))
    assert (pixels.shape, labels.shape) == ((0, 3, 8, 8), (0,))


def test_an_image_is_warped_to_a_square(tmp_path: Path) -> None:
    """Left half red, right half blue, wide: still half and half, channels first, row by row."""
    for part in ("train", "test"):
        image = Image.new("RGB", (40, 10), RED)
        image.paste(BLUE, (20, 0, 40, 10))
        (tmp_path / part / "c").mkdir(parents=True)
        image.save(tmp_path / part / "c" / "1.png")
    pixels = open_folder(tmp_path, 10)[0].batch(torch.tensor([0]))[0][0]
    assert torch.equal(pixels[0, :, :4], torch.full((10, 4), 255, dtype=torch.uint8))
    assert torch.equal(pixels[2, :, 6:], torch.full((10, 4), 255, dtype=torch.uint8))
    assert int(pixels[1].max()) == 0


def noise(file_format: str, side: int) -> bytes:
    """An image file that does not compress, so that it is long enough to be damaged anywhere."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    return encoded(Image.fromarray(pixels), file_format)


JPEG, PNG, BMP = noise("JPEG", 64), noise("PNG", 200), noise("BMP", 8)


@pytest.mark.parametrize(
    "content",
    [
        JPEG[: len(JPEG) // 2],
        JPEG[:10],
        b"",
        b"<html>404 Not Found</html>",
        None,
        # Those that Pillow does not report as an OSError: a SyntaxError (a broken chunk after the
        # first), a ValueError (a header too short), a bomb (2^31 x 8 pixels).
        PNG[: PNG.rindex(b"IDAT")] + b"\xffDAT" + PNG[PNG.rindex(b"IDAT") + 4 :],
        PNG[:8] + struct.pack(">I4s5sI", 5, b"IHDR", bytes(5), zlib.crc32(b"IHDR" + bytes(5))),
        BMP[:18] + struct.pack("<i", 2**31 - 1) + BMP[22:],
    ],
    ids=["half", "start", "empty", "html", "missing", "broken chunk", "short header", "bomb"],
)
def test_a_broken_image_is_named(images: Path, content: bytes | None) -> None:
    path = images / "train" / "b" / "3.jpg"
    path.write_bytes(content or b"")
    train, _ = open_folder(images, 8)
    assert len(train) == 4
    if content is None:
        path.unlink()
    assert len(train.batch(torch.tensor([0, 1, 2]))[0]) == 3
    with pytest.raises(DataError, match=r"not a whole image|cannot be read") as caught:
        train.batch(torch.tensor([0, 3, 1]))
    assert str(caught.value).startswith(f"{path}: ")
    can_be_skipped = content is not None
    assert ('data.on_error = "skip"' in str(caught.value)) == can_be_skipped


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("notes/1.png", "holds no folder train; .*firecaffe pack"),
        ("train/1.png", "train: holds no folders, expected one folder per class"),
        ("train/a/1.png", "holds no folder test or val"),
    ],
)
def test_no_folder_of_that_kind(tmp_path: Path, file: str, part: str) -> None:
    draw(tmp_path / file, RED)
    with pytest.raises(DataError, match=part):
        open_folder(tmp_path, 8)


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_class_without_images_or_unknown_to_training(images: Path, part: str) -> None:
    draw(images / "val" / "c" / "1.png", RED)
    with pytest.raises(DataError, match="class 'c' is not among the 2 training classes"):
        open_folder(images, 8)
    folder = images / part / "a"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(DataError, match=f"^{folder}: holds no images"):
        open_folder(images, 8)


def write(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Images by class, the same ones to train on and to test by."""
    for part, (name, pixels) in product(("train", "test"), arrays.items()):
        (folder / part / name).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def ramp(most: int) -> np.ndarray:
    return np.linspace(0, most, 64).astype(np.uint16).reshape(8, 8)


def test_sixteen_bits_are_scaled_to_eight_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "deep", {"a": ramp(65_535), "b": ramp(30_000)})
    data = open_data(DataConfig("folder", str(folder), resize=8))
    images, _ = data.train.batch(torch.tensor([0, 2]))
    assert (images.amin((1, 2, 3)).tolist(), images.amax((1, 2, 3)).tolist()) == (
        [0, 0],
        [255, 116],
    )
    assert [note.split(" images")[0] for note in data.notes] == ["train: 4 of 4", "test: 4 of 4"]
    assert all("16 bits" in note and "65,535" in note for note in data.notes)
    assert main(["pack", str(folder), str(tmp_path / "raw"), "--raw"]) == 0
    assert "8 images have 16 bits a value" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"dim": ramp(100), "bright": ramp(250)}, ["[0, 0, 0]", "16 bits", "scale them"]),
        ({"a": np.full((8, 8), 7, np.uint8), "b": np.full((9, 9), 7, np.uint8)}, ["[7, 7, 7]"]),
    ],
)
def test_images_in_which_nothing_is_to_be_seen_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], said: list[str]
) -> None:
    config = DataConfig("folder", str(write(tmp_path, arrays)), resize=8)
    with pytest.raises(DataError) as caught:
        open_data(config)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("train: all 4 images looked at have one color")
    assert all(each in line for each in said)


def test_one_that_is_not_blank_or_of_another_color_will_do(tmp_path: Path) -> None:
    plain, other = np.full((8, 8), 7, np.uint8), np.full((8, 8), 8, np.uint8)
    for name, arrays in (("a", {"a": plain, "b": ramp(200).astype(np.uint8)}), ("b", {"a": other})):
        folder = write(tmp_path / name, {"0": plain, **arrays})
        assert not open_data(DataConfig("folder", str(folder), resize=8)).notes


def test_those_looked_at_come_from_all_over() -> None:
    for count in (1, LOOKED_AT - 1, LOOKED_AT, LOOKED_AT + 1, 100 * LOOKED_AT + 7):
        samples = evenly(count)
        assert 1 <= len(samples) <= LOOKED_AT
        assert samples[0] == 0
        assert count - samples[-1] <= -(-count // LOOKED_AT)
