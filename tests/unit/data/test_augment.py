"""Augmentation of a batch against one sample at a time, sliced in plain Python."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.data.augment import center_crop, cropped_shape, normalize, random_crop_mirror
from firecaffe.data.hash import Stream, hash64

MASK = 2**64 - 1


def slow_crop_mirror(
    image_CHW: Tensor, sample: int, seed: int, epoch: int, crop: int, pad: int, mirror: bool
) -> Tensor:
    """One sample: paste into zeros, slice, flip."""

    def draw(stream: Stream, bound: int) -> int:
        return ((int(hash64(seed, stream, epoch, sample)) & MASK) >> 1) % bound

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
    channels, height, width = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )
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
def test_equals_one_sample_at_a_time(
    how: tuple[tuple[int, int, int], int, int, bool],
    samples: list[int],
    seed: int,
    epoch: int,
    dtype: torch.dtype,
) -> None:
    shape, crop, pad, mirror = how
    images = torch.randint(1, 256, (len(samples), *shape)).to(dtype)
    result = random_crop_mirror(
        images,
        torch.tensor(samples, dtype=torch.int64),
        seed=seed,
        epoch=epoch,
        crop=crop,
        pad=pad,
        mirror=mirror,
    )
    assert result.dtype == dtype
    assert result.shape == (len(samples), shape[0], *cropped_shape(shape[1:], crop, pad))
    for row, sample in enumerate(samples):
        expected = slow_crop_mirror(images[row], sample, seed, epoch, crop, pad, mirror)
        assert torch.equal(result[row], expected)


@settings(max_examples=40)
@given(settings_of_crop(), st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
def test_a_sample_is_the_same_in_any_batch(
    how: tuple[tuple[int, int, int], int, int, bool], some: list[int]
) -> None:
    shape, crop, pad, mirror = how
    images = torch.arange(12 * shape[0] * shape[1] * shape[2]).remainder(251).to(torch.uint8)
    images = images.view(12, *shape)

    def augmented(samples: Tensor) -> Tensor:
        return random_crop_mirror(
            images[samples], samples, seed=9, epoch=4, crop=crop, pad=pad, mirror=mirror
        )

    assert torch.equal(augmented(torch.arange(12))[some], augmented(torch.tensor(some)))


def test_each_offset_and_side_comes_equally_often() -> None:
    """18 outcomes of 18,000 samples: 17 degrees of freedom, 99.99th percentile 47."""
    images = torch.zeros(18_000, 1, 3, 3, dtype=torch.uint8)
    images[:, 0, 1, 1] = 1
    images[:, 0, 1, 2] = 2
    result = random_crop_mirror(
        images, torch.arange(18_000), seed=0, epoch=0, crop=5, pad=2, mirror=True
    )
    counts = Counter(map(tuple, result.flatten(1).tolist()))
    assert len(counts) == 18
    assert sum((count - 1000) ** 2 / 1000 for count in counts.values()) < 47


def test_epochs_differ() -> None:
    images = torch.randint(0, 256, (50, 1, 8, 8), dtype=torch.uint8)
    first, second = (
        random_crop_mirror(images, torch.arange(50), seed=0, epoch=epoch, pad=2) for epoch in (0, 1)
    )
    assert not torch.equal(first, second)


def test_nothing_asked_nothing_done() -> None:
    images = torch.randint(0, 256, (3, 1, 4, 5), dtype=torch.uint8)
    assert random_crop_mirror(images, torch.arange(3), seed=0, epoch=0) is images
    assert center_crop(images) is images


@pytest.mark.parametrize(
    ("side", "crop", "pad", "first"), [(8, 4, 0, 2), (9, 4, 0, 2), (8, 0, 2, 0), (8, 8, 3, 0)]
)
def test_center_crop(side: int, crop: int, pad: int, first: int) -> None:
    images = torch.arange(side * side).view(1, 1, side, side).to(torch.float32)
    size = crop or side
    expected = images[:, :, first : first + size, first : first + size]
    assert torch.equal(center_crop(images, crop, pad), expected)


def test_center_crop_larger_than_the_image() -> None:
    images = torch.ones(1, 1, 28, 28, dtype=torch.uint8)
    result = center_crop(images, crop=32, pad=2)
    assert result.shape == (1, 1, 32, 32)
    assert torch.equal(result[:, :, 2:30, 2:30], images)
    assert int(result.sum()) == 28 * 28


@pytest.mark.parametrize(("crop", "pad"), [(-1, 0), (0, -1), (9, 1), (7, 0)])
def test_crops_that_do_not_fit(crop: int, pad: int) -> None:
    with pytest.raises(ValueError, match="a crop of"):
        cropped_shape((6, 8), crop, pad)


def test_normalize_bytes() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalize(images).flatten().tolist() == pytest.approx([0, 0.2, 1])
    result = normalize(images, [0.1, 0.2, 0.5], [2.0, 1.0, 0.25])
    assert result.dtype == torch.float32
    assert result.flatten().tolist() == pytest.approx([-0.05, 0, 2])


def test_normalize_floats_are_not_scaled_or_changed() -> None:
    images = torch.tensor([0.0, 3.0, 7.0]).view(3, 1, 1, 1)
    kept = images.clone()
    assert torch.equal(normalize(images), images)
    assert normalize(images, [1.0], [2.0]).flatten().tolist() == [-0.5, 1, 3]
    assert torch.equal(images, kept)
