"""Encoded images: the same pixels as Pillow's, whatever the format; and each way to be wrong."""

import io

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from torch import Tensor

from firecaffe.data import decode as decode_module
from firecaffe.data.augment import middle
from firecaffe.data.decode import decode, scale, scale_shorter_side
from firecaffe.errors import DataError


def picture(rows: int, columns: int, mode: str = "RGB") -> Image.Image:
    """Noise of 8 x 8, enlarged: photos are smooth."""
    noise = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(1))
    small = Image.frombytes("RGB", (8, 8), bytes(noise.flatten().tolist()))
    return small.resize((columns, rows), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, name: str, **words: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **words)
    return file.getvalue()


def by_pillow(content: bytes) -> Tensor:
    with Image.open(io.BytesIO(content)) as image:
        rgb = image.convert("RGB")
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1)


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
    pixels = by_pillow(encoded(image, "PNG"))
    theirs = image.resize((columns, rows), Image.Resampling.BILINEAR)
    expected = torch.frombuffer(bytearray(theirs.tobytes()), dtype=torch.uint8)
    expected_CHW = expected.view(rows, columns, 3).permute(2, 0, 1)
    found = scale(pixels, rows, columns)
    assert found.shape == (3, rows, columns)
    error = (found.double() - expected_CHW.double()).square().mean() / 255**2
    assert error < 10**-6.3  # 63 dB


def test_scaling_does_not_depend_on_how_pixels_lie_in_memory() -> None:
    pixels = by_pillow(encoded(picture(50, 70), "PNG"))
    assert torch.equal(scale(pixels, 20, 30), scale(pixels.contiguous(), 20, 30))
    part = pixels[:, 5:40, 10:60]
    assert torch.equal(scale(part, 20, 30), scale(part.clone(), 20, 30))


@pytest.mark.parametrize(
    ("size", "expected"), [((100, 200), (10, 20)), ((200, 100), (20, 10)), ((7, 7), (10, 10))]
)
def test_the_shorter_side(size: tuple[int, int], expected: tuple[int, int]) -> None:
    pixels = torch.zeros(3, *size, dtype=torch.uint8)
    assert scale_shorter_side(pixels, 10).shape == (3, *expected)


def test_an_image_of_one_row_and_30000_columns() -> None:
    content = encoded(picture(1, 30_000), "JPEG")
    assert scale(decode(content), 32, 32).shape == (3, 32, 32)


def test_a_16_bit_gray_png_is_not_cut_off() -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    content = encoded(Image.fromarray(values), "PNG")
    found = decode(content)
    assert torch.equal(found[0], torch.from_numpy((values // 257).astype(np.uint8)))


def test_of_an_endless_image_a_test_sees_the_middle_in_little_memory() -> None:
    image = torch.zeros(3, 1, 30_000, dtype=torch.uint8)
    assert middle(image, 256, 224).shape == (3, 224, 224)
    assert scale_shorter_side(image, 256).numel() < 3 * 256 * 256 * 9


@pytest.mark.parametrize("cut", [0, 1, 2, 20, 500])
def test_what_is_cut_is_no_whole_image(cut: int) -> None:
    content = encoded(picture(64, 64), "JPEG")
    with pytest.raises(DataError, match="not a whole image"):
        decode(content[:cut])
    with pytest.raises(DataError, match="not a whole image"):
        decode(content[: len(content) // 2])


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
    monkeypatch.setattr(decode_module, "MOST_PIXELS", 1000)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", None)  # nothing is decoded
    with pytest.raises(DataError, match=r"40 x 50 pixels, and more than .* are not decoded"):
        decode(encoded(picture(40, 50), name))


@pytest.mark.parametrize("name", ["PNG", "WEBP"])
def test_few_bytes_do_not_stand_for_many_pixels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("L", (400, 500)), name)
    monkeypatch.setattr(decode_module, "FEW_PIXELS", 400 * 500)
    decode(content)
    monkeypatch.setattr(decode_module, "FEW_PIXELS", 400 * 500 - 1)
    monkeypatch.setattr(decode_module, "PIXELS_OF_BYTE", 400 * 500 // len(content))
    with pytest.raises(DataError, match=f"are not decoded of {len(content):,} bytes"):
        decode(content)
    decode(content + bytes(len(content)))  # which is more than enough of them


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "I;16"])
def test_an_image_that_is_decoded_in_strips(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture(70, 50)
    if mode == "I;16":
        image = Image.fromarray(np.arange(3500, dtype=np.uint16).reshape(70, 50) * 17)
    content = encoded(image.convert(mode), "PNG")
    whole = decode(content)
    monkeypatch.setattr(decode_module, "STRIP_PIXELS", 50 * 9 + 1)
    assert torch.equal(decode(content), whole)
