"""Encoded images: the same pixels as Pillow's, turned as Pillow does; each way to be wrong."""

import io
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps
from torch import Tensor

from firecaffe.cli import main
from firecaffe.data import DataConfig, open_data
from firecaffe.data import decode as decode_module
from firecaffe.data.decode import (
    APPLY,
    IGNORE,
    decode,
    decoded,
    orientation,
    scale,
    scale_shorter_side,
    with_orientation,
)
from firecaffe.errors import DataError, RecipeError
from firecaffe.training.given_parts import About
from firecaffe.training.prediction import read_image
from tests.kit.data_photos import encoded, picture


def pixels_of(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def by_pillow(content: bytes) -> Tensor:
    return pixels_of(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("JPEG", "RGB", {"subsampling": 0}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("PNG", "1", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("BMP", "RGB", {}),
    ],
)
def test_the_pixels_are_pillows(name: str, mode: str, words: dict[str, object]) -> None:
    content = encoded(picture(37, 53, mode), name, **words)
    assert torch.equal(decode(content), by_pillow(content))


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 90), (200, 300), (1, 7)])
def test_scaling_is_pillows_within_rounding(rows: int, columns: int) -> None:
    image = picture(120, 160)
    theirs = pixels_of(image.resize((columns, rows), Image.Resampling.BILINEAR))
    scaled = scale(pixels_of(image), rows, columns)
    assert scaled.shape == (3, rows, columns)
    error = (scaled.double() - theirs.double()).square().mean() / 255**2
    assert error < 10**-6.3  # 63 dB


@pytest.mark.parametrize(
    ("size", "scaled"),
    [((100, 200), (10, 20)), ((200, 100), (20, 10)), ((7, 7), (10, 10)), ((1, 30_000), (10, 80))],
)
def test_the_shorter_side(size: tuple[int, int], scaled: tuple[int, int]) -> None:
    """An endless image is not scaled to endlessly many pixels."""
    assert scale_shorter_side(torch.zeros(3, *size, dtype=torch.uint8), 10).shape == (3, *scaled)


def test_scaling_does_not_depend_on_how_pixels_lie_in_memory() -> None:
    whole = pixels_of(picture(50, 70))
    assert torch.equal(scale(whole, 20, 30), scale(whole.contiguous(), 20, 30))
    part = whole[:, 5:40, 10:60]
    assert torch.equal(scale(part, 20, 30), scale(part.clone(), 20, 30))


@pytest.mark.parametrize("name", ["PNG", "BMP", "JPEG"])
def test_pillow_s_own_limit_stays_and_is_not_ours(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Image.MAX_IMAGE_PIXELS == 1024**3 // 4 // 3  # as Pillow sets it
    content = encoded(picture(40, 50, "CMYK" if name == "JPEG" else "RGB"), name)
    expected = by_pillow(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(content))
    assert torch.equal(decode(content), expected)


@pytest.mark.parametrize("name", ["JPEG", "PNG"])
def test_a_bomb_is_refused_by_its_header(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "MAX_PIXELS", 1000)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", None)  # nothing is decoded
    with pytest.raises(DataError, match=r"40 x 50 pixels, and more than .* are not decoded"):
        decode(encoded(picture(40, 50), name))


@pytest.mark.parametrize("name", ["PNG", "WEBP"])
def test_few_bytes_do_not_stand_for_many_pixels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("L", (400, 500)), name)
    monkeypatch.setattr(decode_module, "FEW_PIXELS", 400 * 500)
    decode(content)
    monkeypatch.setattr(decode_module, "FEW_PIXELS", 400 * 500 - 1)
    monkeypatch.setattr(decode_module, "PIXELS_PER_BYTE", 400 * 500 // len(content))
    with pytest.raises(DataError, match=f"are not decoded of {len(content):,} bytes"):
        decode(content)
    decode(content + bytes(len(content)))  # which is more than enough of them


DEEP = np.linspace(0, 65_535, 3500).astype(np.uint16).reshape(70, 50)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "I;16"])
def test_an_image_that_is_decoded_in_strips(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(DEEP) if mode == "I;16" else picture(70, 50).convert(mode)
    content = encoded(image, "PNG")
    whole = decode(content)
    if mode == "I;16":  # 16 bits are not cut off
        assert torch.equal(whole[0], torch.from_numpy((DEEP // 257).astype(np.uint8)))
    monkeypatch.setattr(decode_module, "STRIP_PIXELS", 50 * 9 + 1)
    assert torch.equal(decode(content), whole)


def turned(how: int, name: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = how
    return encoded(picture(24, 40), name, exif=exif)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("how", range(1, 9))
def test_a_photo_is_turned_as_pillow_turns_it(how: int, name: str) -> None:
    content = turned(how, name)
    assert orientation(content) == how
    upright = encoded(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), "PNG")
    assert torch.equal(decoded(content, APPLY), decode(upright))
    assert torch.equal(decoded(content, IGNORE), decode(content))


@pytest.mark.parametrize("how", [0, 9, 255])
def test_what_is_no_orientation_turns_nothing(how: int) -> None:
    content = turned(how)
    assert orientation(content) == orientation(content[:40]) == 1  # cut within its EXIF
    assert orientation(encoded(picture(8, 8), "JPEG")) == 1
    assert orientation(b"Exif\0\0 in what is no image") == 1


def test_an_orientation_is_written_into_a_jpeg() -> None:
    plain = encoded(picture(24, 40), "JPEG")
    for how in range(2, 9):
        assert orientation(with_orientation(plain, how)) == how
    assert torch.equal(decode(with_orientation(plain, 6)), decode(plain))


def pixels(image: Tensor) -> bytes:
    return image.numpy().tobytes()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two of four training photos lie on their side, and no test photo."""
    files = {
        f"train/{'ab'[number % 2]}/{number}.jpg": 6 if number < 2 else 1 for number in range(4)
    }
    for name, how in (files | {"test/a/0.jpg": 1, "test/b/0.jpg": 1}).items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(turned(how))
    return tmp_path / "photos"


def test_they_are_counted_or_turned_and_predict_reads_them_so(photos: Path) -> None:
    as_stored = DataConfig("folder", str(photos), resize=24, hold_out=0.25)
    applied = DataConfig("folder", str(photos), resize=24, hold_out=0.25, exif=APPLY)
    (note,) = open_data(as_stored).notes
    assert all(part in note for part in ("train: 2 of 4 images", 'data.exif = "apply"'))
    assert open_data(applied).notes == ()
    about = About(2, 3, (), (3, 24, 24), True, (3, 24, 24), "float32", ())
    for config, pictures in ((as_stored, 1), (applied, 2)):  # all are of one
        data = open_data(config)
        parts = [part for part in data.parts.values() if part is not data.test]
        seen = {pixels(image) for part in parts for image in part.batch(torch.arange(len(part)))[0]}
        assert len(seen) == pictures
        for name in ("0.jpg", "2.jpg"):
            assert pixels(read_image(photos / "train" / "a" / name, about, config)) in seen
    with pytest.raises(RecipeError, match=r"data\.exif is 'turn', expected one of ignore, apply"):
        open_data(DataConfig("folder", str(photos), exif="turn"))


def test_shards_keep_it(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("kept", []), ("small", ["--resize", "16"])):
        assert main(["pack", str(photos), str(tmp_path / name), *words]) == 0
        assert "EXIF" not in capsys.readouterr().out
        path = str(tmp_path / name)
        (note,) = open_data(DataConfig("packed", path, resize=16)).notes
        assert note.startswith("train: 2 of 4 images")
        train = open_data(DataConfig("packed", path, resize=16, exif=APPLY)).train
        assert len({pixels(image) for image in train.batch(torch.arange(4))[0]}) == 2
    assert main(["pack", str(photos), str(tmp_path / "raw"), "--raw", "--resize", "16"]) == 0
    assert "2 images say (EXIF)" in " ".join(capsys.readouterr().out.split())
