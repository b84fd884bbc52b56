"""ROIPooling and PSROIPooling against plain loops over the bins, written from the papers."""

import math

import numpy as np
import pytest
import torch

from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal

ROI = layer("ROIPooling", "roi_pooling_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.5 }")
PSROI = layer(
    "PSROIPooling", "psroi_pooling_param { output_dim: 2 group_size: 3 spatial_scale: 0.25 }"
)
REGIONS = np.array(
    [
        [0, 0, 0, 13, 15],
        [1, 3, 1, 4, 9],  # 3 · 0.5 is rounded up
        [0, 5, 5, 5, 5],  # one pixel
        [1, 9, 7, 4, 2],  # ends before it begins
        [0, -5, -3, 6, 40],  # across the border
        [1, 60, 60, 70, 70],  # outside
        [0, -9, -7, -5, -5],
    ],
    np.float32,
)


def away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def clipped(start: float, end: float, size: int) -> range:
    return range(min(max(math.floor(start), 0), size), min(max(math.ceil(end), 0), size))


def largest_of_bins(planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    high, wide = 3, 2
    out = np.zeros((len(regions), planes.shape[1], high, wide), planes.dtype)
    for r, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (away(float(each) * 0.5) for each in corners)
        bin_h = np.float32(max(y2 - y1 + 1, 1)) / np.float32(high)
        bin_w = np.float32(max(x2 - x1 + 1, 1)) / np.float32(wide)
        for i in range(high):
            rows = clipped(
                math.floor(i * bin_h) + y1, math.ceil((i + 1) * bin_h) + y1, planes.shape[2]
            )
            for j in range(wide):
                columns = clipped(
                    math.floor(j * bin_w) + x1, math.ceil((j + 1) * bin_w) + x1, planes.shape[3]
                )
                if rows and columns:
                    part = planes[int(image)][
                        :, rows.start : rows.stop, columns.start : columns.stop
                    ]
                    out[r, :, i, j] = part.max((1, 2))
    return out


def averages_of_bins(planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    size = 3
    outputs = planes.shape[1] // size**2
    out = np.zeros((len(regions), outputs, size, size), planes.dtype)
    for r, (image, *corners) in enumerate(regions):
        x1, y1 = (away(float(each)) * 0.25 for each in corners[:2])
        x2, y2 = ((away(float(each)) + 1) * 0.25 for each in corners[2:])
        bin_w, bin_h = max(x2 - x1, 0.1) / size, max(y2 - y1, 0.1) / size
        for i in range(size):
            rows = clipped(i * bin_h + y1, (i + 1) * bin_h + y1, planes.shape[2])
            for j in range(size):
                columns = clipped(j * bin_w + x1, (j + 1) * bin_w + x1, planes.shape[3])
                for c in range(outputs):
                    plane = planes[int(image), (c * size + i) * size + j]
                    part = [plane[y, x] for y in rows for x in columns]
                    out[r, c, i, j] = sum(part) / len(part) if part else 0
    return out


def drawn(channels: int) -> np.ndarray:
    return np.random.RandomState(1).standard_normal((2, channels, 8, 7)).astype(np.float32)


def test_roi_pooling_takes_the_largest_of_each_bin() -> None:
    planes = drawn(4)
    module = module_of(ROI, planes.shape, REGIONS.shape)
    found = module(torch.from_numpy(planes), torch.from_numpy(REGIONS))
    np.testing.assert_array_equal(found.numpy(), largest_of_bins(planes, REGIONS))
    assert not found[5:].any()  # outside, every bin is empty


def test_regions_of_four_axes_and_more_than_are_held_at_once() -> None:
    planes = drawn(2)
    regions = np.tile(REGIONS, (6, 1))[:41, :, None, None]
    module = module_of(ROI, planes.shape, regions.shape)
    found = module(torch.from_numpy(planes), torch.from_numpy(regions))
    np.testing.assert_array_equal(found.numpy(), largest_of_bins(planes, regions[..., 0, 0]))


def test_psroi_pooling_averages_each_bin_in_channels_of_its_own() -> None:
    planes, regions = drawn(18), REGIONS * np.array([1, 2, 2, 2, 2], np.float32)
    module = module_of(PSROI, planes.shape, regions.shape)
    found = module(torch.from_numpy(planes), torch.from_numpy(regions))
    np.testing.assert_allclose(
        found.numpy(), averages_of_bins(planes, regions), rtol=1e-5, atol=1e-6
    )
    assert found.abs().sum((1, 2, 3)).bool().tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize(("words", "channels"), [(ROI, 2), (PSROI, 18)])
def test_the_gradients_are_those_of_the_numbers(words: str, channels: int) -> None:
    planes = torch.from_numpy(drawn(channels)).double().requires_grad_()
    regions = torch.from_numpy(REGIONS).double()
    module = module_of(words, tuple(planes.shape), REGIONS.shape)
    assert torch.autograd.gradcheck(lambda p: module(p, regions), (planes,), fast_mode=True)


def test_of_equal_values_the_first_has_the_gradient() -> None:
    planes = torch.zeros(2, 1, 8, 7, requires_grad=True)
    module = module_of(ROI, tuple(planes.shape), (1, 5))
    module(planes, torch.tensor([[0.0, 0, 0, 12, 14]])).sum().backward()
    assert planes.grad is not None
    # Bins of 8 / 3 rows overlap: they begin in rows 0, 2 and 5, and in columns 0 and 3.
    assert planes.grad[0, 0].nonzero().tolist() == [
        [row, column] for row in (0, 2, 5) for column in (0, 3)
    ]


def test_no_region_and_the_meta_device() -> None:
    module = module_of(ROI, (2, 4, 8, 7), (0, 5))
    assert module(torch.zeros(2, 4, 8, 7), torch.zeros(0, 5)).shape == (0, 4, 3, 2)
    assert on_meta(ROI, (2, 4, 8, 7), (9, 5)) == [(9, 4, 3, 2)]
    assert on_meta(PSROI, (2, 18, 8, 7), (9, 5)) == [(9, 2, 3, 3)]


def test_what_cannot_be_is_one_line() -> None:
    assert "(R, 5)" in refusal(ROI, (2, 4, 8, 7), (9, 4))
    assert "pooled_h" in refusal(layer("ROIPooling"), (2, 4, 8, 7), (9, 5))
    line = refusal(PSROI, (2, 17, 8, 7), (9, 5))
    assert "17 channels" in line
    assert "18" in line
    assert line.startswith("net.prototxt:1: ")
