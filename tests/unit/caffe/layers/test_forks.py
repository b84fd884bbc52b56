"""Layers of forks, of which there is no real Caffe: against plain loops, with their gradients."""

import math

import numpy as np
import torch
from torch import Tensor, nn

from tests.unit.caffe.layers.made import layer, module_of, on_meta

SHAPE = (4, 3, 2, 5)
FILLERS = "slope_filler { value: 2 } bias_filler { value: 0.5 }"


def averaged(words: str = "") -> nn.Module:
    module = module_of(layer("BN", f"bn_param {{ {FILLERS} {words} }}"), SHAPE).double()
    for name, blob in [*module.named_parameters(), *module.named_buffers()]:
        assert blob.shape == (1, 3, 1, 1), name
        blob.data += torch.rand(blob.shape, dtype=torch.double)
    return module


def expected(planes: Tensor, module: nn.Module, eps: float, statistics: str) -> Tensor:
    """x less the mean, over the root of variance + eps, times the slope, plus the bias."""
    blobs = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    out = torch.zeros_like(planes)
    for c in range(planes.shape[1]):
        values = planes[:, c]
        mean = values.sum() / values.numel()
        variance = ((values - mean) ** 2).sum() / values.numel()
        if statistics == "averages":
            mean, variance = blobs["mean"][0, c, 0, 0], blobs["variance"][0, c, 0, 0]
        slope, bias = blobs["weight"][0, c, 0, 0], blobs["bias"][0, c, 0, 0]
        out[:, c] = (values - mean) / (variance + eps) ** 0.5 * slope + bias
    return out


def test_averages_are_kept_while_training_and_used_otherwise() -> None:
    module = averaged("momentum: 0.75 eps: 0.01")
    planes = torch.randn(SHAPE, dtype=torch.double, requires_grad=True)
    before = {name: blob.clone() for name, blob in module.named_buffers()}
    found = module.train()(planes)
    torch.testing.assert_close(found, expected(planes, module, 0.01, "own"))
    for c in range(3):
        values = planes.detach()[:, c]
        own = {"mean": values.mean(), "variance": values.var(correction=0)}
        for name, blob in module.named_buffers():
            kept = 0.75 * before[name][0, c, 0, 0] + 0.25 * own[name]
            torch.testing.assert_close(blob[0, c, 0, 0], kept)
    assert torch.autograd.gradcheck(module, (planes,), fast_mode=True)
    found = module.eval()(planes)
    torch.testing.assert_close(found, expected(planes, module, 0.01, "averages"))
    assert torch.autograd.gradcheck(module, (planes,), fast_mode=True)


def test_frozen_averages_are_used_in_training_and_nothing_is_trained() -> None:
    module = averaged("frozen: true").train()
    assert not list(module.parameters())
    planes = torch.randn(SHAPE, dtype=torch.double)
    before = [blob.clone() for blob in module.buffers()]
    torch.testing.assert_close(module(planes), expected(planes, module, 1e-5, "averages"))
    assert all(map(torch.equal, before, module.buffers()))


def test_blobs_start_as_the_file_says() -> None:
    module = module_of(layer("BN", f"bn_param {{ {FILLERS} frozen: true }}"), SHAPE)
    starts = {name: float(blob[0, 0, 0, 0]) for name, blob in module.named_buffers()}
    assert starts == {"weight": 2, "bias": 0.5, "mean": 0, "variance": 1}
    module = module_of(layer("BN", "bn_param { shift_filler { value: 0.25 } }"), SHAPE)
    starts = {name: float(blob.detach()[0, 2, 0, 0]) for name, blob in module.named_parameters()}
    assert starts == {"weight": 0, "bias": 0.25}


def test_its_own_statistics_are_used_in_each_phase() -> None:
    module = module_of(layer("BN", "bn_param { scale_filler { value: 2 } }"), SHAPE).double()
    planes = torch.randn(SHAPE, dtype=torch.double, requires_grad=True)
    for training in (True, False):
        found = module.train(training)(planes)
        torch.testing.assert_close(found, expected(planes, module, 1e-9, "own"))
    assert torch.autograd.gradcheck(module, (planes,), fast_mode=True)


def test_inference_scales_and_shifts() -> None:
    words = "bn_param { bn_mode: INFERENCE scale_filler { value: 2 } shift_filler { value: 3 } }"
    planes = torch.randn(SHAPE)
    assert torch.equal(module_of(layer("BN", words), SHAPE)(planes), planes * 2 + 3)


def test_planes_of_one_value_and_the_meta_device() -> None:
    text = layer("BN", f"bn_param {{ {FILLERS} }}")
    found = module_of(text, (1, 3, 1, 1))(torch.randn(1, 3, 1, 1))
    torch.testing.assert_close(found, torch.full((1, 3, 1, 1), 0.5), atol=1e-4, rtol=0)
    assert on_meta(text, SHAPE) == [SHAPE]


def normalized(values: Tensor, scale: Tensor, across: bool, eps: float) -> Tensor:
    """x / sqrt(sum of x² + eps) · scale."""
    out = torch.zeros_like(values)
    for n in range(values.shape[0]):
        for i in range(values.shape[2]):
            for j in range(values.shape[3]):
                part = values[n] if across else values[n, :, i, j]
                length = math.sqrt(sum(float(x) ** 2 for x in part.flatten()) + eps)
                out[n, :, i, j] = values[n, :, i, j] / length * scale
    return out


def axes_beside(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, 2, 3) if shape else (0, 1, 2, 3)


def test_normalize() -> None:
    values = torch.randn(2, 3, 2, 4, dtype=torch.double, requires_grad=True)
    for words, across, shape, eps, start in (
        ("", True, (), 1e-10, 1.0),
        ("across_spatial: false channel_shared: false", False, (3,), 1e-10, 1.0),
        (
            "across_spatial: false channel_shared: false eps: 0.5 "
            'scale_filler { type: "constant" value: 20 }',
            False,
            (3,),
            0.5,
            20.0,
        ),
    ):
        text = layer("Normalize", f"norm_param {{ {words} }}")
        module = module_of(text, (2, 3, 2, 4)).double()
        assert isinstance(module.weight, torch.nn.Parameter)
        assert torch.equal(module.weight.detach(), torch.full(shape, start).double())
        module.weight.data += torch.rand(shape).double()
        expected = normalized(values.detach(), module.weight.detach(), across, eps)
        torch.testing.assert_close(module(values).detach(), expected)
        assert torch.autograd.gradcheck(module, (values,), fast_mode=True)
        module(values).sum().backward()
        torch.testing.assert_close(
            module.weight.grad, expected.sum(axes_beside(shape)) / module.weight.detach()
        )
        assert on_meta(text, (2, 3, 2, 4)) == [(2, 3, 2, 4)]


def test_mvn_of_a_plane_of_one_value_has_a_finite_gradient() -> None:
    values = torch.full((1, 2, 3, 3), 5.0, requires_grad=True)
    module = module_of(layer("MVN"), (1, 2, 3, 3))
    module(values).sum().backward()
    assert values.grad is not None
    assert values.grad.isfinite().all()


def test_shuffle_channel_is_a_transposition_of_groups() -> None:
    values = torch.randn(2, 6, 2, 3)
    text = layer("ShuffleChannel", "shuffle_channel_param { group: 3 }")
    found = module_of(text, (2, 6, 2, 3))(values)
    for group in range(3):
        for place in range(2):
            assert torch.equal(found[:, place * 3 + group], values[:, group * 2 + place])


def test_axpy() -> None:
    scale, values, others = (
        torch.randn(shape, dtype=torch.double, requires_grad=True)
        for shape in ((2, 3, 1, 1), (2, 3, 2, 4), (2, 3, 2, 4))
    )
    module = module_of(layer("Axpy"), (2, 3, 1, 1), (2, 3, 2, 4), (2, 3, 2, 4))
    found = module(scale, values, others)
    for n in range(2):
        for c in range(3):
            expected = scale[n, c, 0, 0] * values[n, c] + others[n, c]
            assert torch.equal(found[n, c], expected)
    assert torch.autograd.gradcheck(module, (scale, values, others), fast_mode=True)


def test_depthwise_convolution_has_a_filter_for_each_channel() -> None:
    values = torch.randn(2, 3, 5, 6, dtype=torch.double)
    words = "convolution_param { num_output: 3 kernel_size: 3 stride: 2 pad: 1 group: 1 }"
    for kind in ("ConvolutionDepthwise", "DepthwiseConvolution"):
        module = module_of(layer(kind, words), (2, 3, 5, 6)).double()
        blobs = dict(module.named_parameters())
        assert [tuple(each.shape) for each in blobs.values()] == [(3, 1, 3, 3), (3,)]
        for each in blobs.values():
            each.data = torch.randn(each.shape, dtype=torch.double)
        weight, bias = blobs["weight"], blobs["bias"]
        found = module(values)
        padded = torch.nn.functional.pad(values, (1, 1, 1, 1))
        for i in range(3):
            for j in range(3):
                window = padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
                expected = (window * weight[:, 0]).sum((2, 3)) + bias
                torch.testing.assert_close(found[:, :, i, j], expected)


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
