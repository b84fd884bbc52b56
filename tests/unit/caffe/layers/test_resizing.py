"""Interp and Upsample against plain loops over the places of the top."""

import numpy as np
import torch

from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal


def interpolated(planes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear, the corners on each other."""
    rows, columns = planes.shape[2:]
    out = np.zeros((*planes.shape[:2], height, width), planes.dtype)
    for i in range(height):
        y = i * (rows - 1) / (height - 1) if height > 1 else 0.0
        for j in range(width):
            x = j * (columns - 1) / (width - 1) if width > 1 else 0.0
            top, left = int(y), int(x)
            below, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            v, u = y - top, x - left
            out[:, :, i, j] = (1 - v) * (
                (1 - u) * planes[:, :, top, left] + u * planes[:, :, top, right]
            ) + v * ((1 - u) * planes[:, :, below, left] + u * planes[:, :, below, right])
    return out


def test_interp() -> None:
    planes = np.random.RandomState(1).standard_normal((2, 3, 5, 7))
    for words, height, width, cut in (
        ("height: 9 width: 4", 9, 4, (0, 0)),
        ("height: 1 width: 1", 1, 1, (0, 0)),
        ("zoom_factor: 3", 13, 19, (0, 0)),
        ("shrink_factor: 2", 3, 4, (0, 0)),
        ("shrink_factor: 2 zoom_factor: 3", 7, 10, (0, 0)),
        ("zoom_factor: 2 pad_beg: -1 pad_end: -2", 3, 7, (1, 2)),
    ):
        text = layer("Interp", f"interp_param {{ {words} }}")
        values = torch.from_numpy(planes).requires_grad_()
        found = module_of(text, planes.shape)(values)
        begin, end = cut
        kept = planes[:, :, begin : 5 - end, begin : 7 - end]
        np.testing.assert_allclose(found.detach(), interpolated(kept, height, width), atol=1e-12)
        assert on_meta(text, planes.shape) == [(2, 3, height, width)], words
        assert torch.autograd.gradcheck(module_of(text, planes.shape), (values,), fast_mode=True), (
            words
        )


def test_upsample_repeats_each_value() -> None:
    planes = torch.randn(2, 3, 2, 3, dtype=torch.double, requires_grad=True)
    module = module_of(layer("Upsample", "upsample_param { scale: 3 }"), tuple(planes.shape))
    assert torch.equal(module(planes), planes.repeat_interleave(3, 2).repeat_interleave(3, 3))
    assert torch.autograd.gradcheck(module, (planes,))


def test_upsample_by_a_mask_puts_each_value_where_it_was_the_largest() -> None:
    planes = torch.randn(2, 3, 5, 6)
    pooled, places = torch.nn.functional.max_pool2d(planes, 2, ceil_mode=True, return_indices=True)
    shape = tuple(pooled.shape)
    for words in ("upsample_h: 5 upsample_w: 6", "scale: 2 pad_out_h: true"):
        text = layer("Upsample", f"upsample_param {{ {words} }}")
        found = module_of(text, shape, shape)(pooled, places.float())
        expected = torch.zeros_like(planes)
        for n in range(2):
            for c in range(3):
                for i in range(3):
                    for j in range(3):
                        row, column = divmod(int(places[n, c, i, j]), 6)
                        expected[n, c, row, column] = pooled[n, c, i, j]
        assert torch.equal(found, expected), words
        assert on_meta(text, shape, shape) == [(2, 3, 5, 6)], words


def test_what_cannot_be_is_one_line() -> None:
    shape = (2, 3, 5, 7)
    for words, part in (
        ("", "neither"),
        ("height: 3 width: 3 zoom_factor: 2", "both"),
        ("height: 3", "no width"),
        ("zoom_factor: 0", "zoom_factor is 0"),
        ("zoom_factor: 2 pad_beg: 1", "pad_beg is 1"),
        ("zoom_factor: 2 pad_beg: -3 pad_end: -2", "leave nothing"),
    ):
        assert part in refusal(layer("Interp", f"interp_param {{ {words} }}"), shape), words
    assert "same shape" in refusal(layer("Upsample"), (2, 3, 5, 7), (2, 3, 5, 6))
