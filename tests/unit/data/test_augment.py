"""What is drawn for a sample, by its key alone: the hash, crops and mirrors, random boxes."""

from math import exp, log, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.data.augment import (
    ATTEMPTS,
    box,
    center_crop,
    cropped_shape,
    draws,
    middle,
    normalize,
    random_crop_mirror,
)
from firecaffe.data.hash import Stream, below, hash64

MASK = 2**64 - 1
KEYS = st.integers(-(2**63), 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)


def slow_hash(*keys: int) -> int:
    """In plain Python: splitmix64 of the state and each key in turn."""
    state = 0
    for key in keys:
        z = ((state ^ (key & MASK)) + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        state = z ^ (z >> 31)
    return state


def test_one_key_gives_the_published_output() -> None:
    assert int(hash64(0)) & MASK == 0xE220A8397B1DCDAF  # of the Java and Rust implementations
    assert int(hash64(1234567)) == 6457827717110365317  # Rosetta Code, ".../Splitmix64"


@settings(max_examples=50)
@given(st.lists(KEYS, min_size=1, max_size=4), st.lists(INT64, min_size=1, max_size=20), KEYS)
def test_hashes_equal_plain_python(keys: list[int], rows: list[int], last: int) -> None:
    assert int(hash64(*keys)) & MASK == slow_hash(*keys)
    hashes = hash64(*keys, torch.tensor(rows).view(-1, 1), torch.arange(2), last)
    wanted = [[slow_hash(*keys, row, column, last) for column in range(2)] for row in rows]
    assert [[value & MASK for value in row] for row in hashes.tolist()] == wanted


@settings(max_examples=50)
@given(INT64, st.integers(1, 10**6))
def test_below_takes_the_upper_63_bits(value: int, bound: int) -> None:
    assert int(below(torch.tensor(value), bound)) == ((value & MASK) >> 1) % bound


def test_streams_have_numbers_of_their_own() -> None:
    assert len(Stream.__members__) == len({int(stream) for stream in Stream})


def slow_crop_mirror(
    image_CHW: Tensor, sample: int, seed: int, epoch: int, crop: int, pad: int, mirror: bool
) -> Tensor:
    """One sample: paste into zeros, slice, flip."""

    def draw(stream: Stream, bound: int) -> int:
        return (slow_hash(seed, stream, epoch, sample) >> 1) % bound

    channels, height, width = image_CHW.shape
    padded = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=image_CHW.dtype)
    padded[:, pad : pad + height, pad : pad + width] = image_CHW
    rows, columns = (crop, crop) if crop else (height, width)
    top = draw(Stream.CROP_TOP, height + 2 * pad - rows + 1)
    left = draw(Stream.CROP_LEFT, width + 2 * pad - columns + 1)
    cut = padded[:, top : top + rows, left : left + columns]
    return cut.flip(2) if mirror and draw(Stream.MIRROR, 2) == 1 else cut


@st.composite
def settings_of_crop(draw: st.DrawFn) -> tuple[tuple[int, int, int], int, int, bool]:
    channels, height, width = (draw(st.integers(1, most)) for most in (3, 9, 9))
    pad = draw(st.integers(0, 3))
    crop = draw(st.integers(0, min(height, width) + 2 * pad))
    return (channels, height, width), crop, pad, draw(st.booleans())


@settings(max_examples=60)
@given(
    settings_of_crop(),
    st.lists(st.integers(0, 10**9), max_size=6),
    st.integers(0, 2**63),
    st.integers(0, 100),
    st.sampled_from([torch.uint8, torch.float32]),
)
def test_crops_equal_one_sample_at_a_time(
    how: tuple[tuple[int, int, int], int, int, bool],
    samples: list[int],
    seed: int,
    epoch: int,
    dtype: torch.dtype,
) -> None:
    shape, crop, pad, mirror = how
    images = torch.randint(1, 256, (len(samples), *shape)).to(dtype)
    samples_B = torch.tensor(samples, dtype=torch.int64)
    words = {"seed": seed, "epoch": epoch, "crop": crop, "pad": pad, "mirror": mirror}
    result = random_crop_mirror(images, samples_B, **words)  # type: ignore[arg-type]
    assert result.dtype == dtype
    assert result.shape == (len(samples), shape[0], *cropped_shape(shape[1:], crop, pad))
    for row, sample in enumerate(samples):
        expected = slow_crop_mirror(images[row], sample, seed, epoch, crop, pad, mirror)
        assert torch.equal(result[row], expected)


@pytest.mark.parametrize(
    ("side", "crop", "pad", "first"),
    [(8, 4, 0, 2), (9, 4, 0, 2), (8, 0, 2, 0), (8, 8, 3, 0), (8, 12, 2, -2)],
)
def test_center_crop(side: int, crop: int, pad: int, first: int) -> None:
    images = torch.arange(side * side).view(1, 1, side, side).to(torch.float32)
    size = crop or side
    edge = max(0, -first)
    expected = torch.zeros(1, 1, size, size)
    inner = images[:, :, max(0, first) : first + size, max(0, first) : first + size]
    expected[:, :, edge : edge + inner.shape[2], edge : edge + inner.shape[3]] = inner
    assert torch.equal(center_crop(images, crop, pad), expected)


@pytest.mark.parametrize(("crop", "pad"), [(-1, 0), (0, -1), (9, 1), (7, 0)])
def test_crops_that_do_not_fit(crop: int, pad: int) -> None:
    with pytest.raises(ValueError, match="a crop of"):
        cropped_shape((6, 8), crop, pad)


def test_normalize_scales_bytes_alone_and_changes_nothing_given() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalize(pixels).flatten().tolist() == pytest.approx([0, 0.2, 1])
    result = normalize(pixels, [0.1, 0.2, 0.5], [2.0, 1.0, 0.25])
    assert result.dtype == torch.float32
    assert result.flatten().tolist() == pytest.approx([-0.05, 0, 2])
    numbers = torch.tensor([0.0, 3.0, 7.0]).view(3, 1, 1, 1)
    assert torch.equal(normalize(numbers), numbers)
    assert normalize(numbers, [1.0], [2.0]).flatten().tolist() == [-0.5, 1, 3]
    assert numbers.flatten().tolist() == [0, 3, 7]


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**40))
def test_a_box_lies_in_its_image(rows: int, columns: int, sample: int) -> None:
    drawn = draws(0, 0, torch.tensor([sample])).tolist()[0]
    top, left, height, width = box(drawn, rows, columns)
    assert 0 <= top < top + height <= rows
    assert 0 <= left < left + width <= columns


def test_a_box_is_the_formula_s_of_the_first_draw_that_fits() -> None:
    whole = [1.0, 0.5, 0.0, 0.0]  # the whole area in a square
    area = 0.08 + 0.5 * 0.92
    ratio = exp(log(3 / 4) + 0.25 * (log(4 / 3) - log(3 / 4)))
    width, height = round(sqrt(400 * 300 * area * ratio)), round(sqrt(400 * 300 * area / ratio))
    expected = (int(0.5 * (300 - height + 1)), int(0.999 * (400 - width + 1)), height, width)
    assert box([whole] + [[0.5, 0.25, 0.5, 0.999]] * (ATTEMPTS - 1), 300, 400) == expected
    # Where none fits, the middle is taken.
    assert box([whole] * ATTEMPTS, 100, 1000) == (0, 433, 100, 133)
    assert box([whole] * ATTEMPTS, 1000, 100) == (433, 0, 133, 100)


def test_draws_are_the_hashes_of_the_sample_and_not_of_its_batch() -> None:
    for place, sample in enumerate(samples := [5, 9, 100]):
        hashes = [slow_hash(7, Stream.BOX, 2, sample, number) for number in range(4 * ATTEMPTS)]
        drawn = draws(7, 2, torch.tensor(samples))[place].flatten().tolist()
        assert drawn == [(value >> 11) / 2**53 for value in hashes]


@pytest.mark.parametrize("size", [(100, 150), (150, 100), (17, 400), (1, 30_000)])
def test_a_test_sees_the_middle(size: tuple[int, int]) -> None:
    image = torch.arange(3 * size[0] * size[1]).remainder(251).to(torch.uint8).view(3, *size)
    assert middle(image, 32, 28).shape == (3, 28, 28)
