"""Layers of forks, of which there is no real Caffe: against plain loops, with their gradients."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from firecaffe.caffe.layers.spec import Shape
from tests.unit.caffe.layers.made import layer, layer_of, module_of, on_meta

SHAPE = (4, 3, 2, 5)
FILLERS = "slope_filler { value: 2 } bias_filler { value: 0.5 }"


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def check(module: nn.Module, expected: Tensor, *values: Tensor) -> None:
    """That it comes to these numbers, and that its gradients are theirs."""
    torch.testing.assert_close(module(*values), expected)
    assert torch.autograd.gradcheck(module, values, fast_mode=True)


def averaged(words: str = "") -> nn.Module:
    module = layer_of("BN", f"bn_param {{ {FILLERS} {words} }}", SHAPE).double()
    for name, blob in [*module.named_parameters(), *module.named_buffers()]:
        assert blob.shape == (1, 3, 1, 1), name
        blob.data += torch.rand(blob.shape, dtype=torch.double)
    return module


def normalized(planes: Tensor, module: nn.Module, eps: float, by_averages: bool) -> Tensor:
    """x less the mean, over the root of variance + eps, times the slope, plus the bias."""
    blobs = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    out = torch.zeros_like(planes)
    for c in range(planes.shape[1]):
        values = planes[:, c]
        mean = values.sum() / values.numel()
        variance = ((values - mean) ** 2).sum() / values.numel()
        if by_averages:
            mean, variance = blobs["mean"][0, c, 0, 0], blobs["variance"][0, c, 0, 0]
        slope, bias = blobs["weight"][0, c, 0, 0], blobs["bias"][0, c, 0, 0]
        out[:, c] = (values - mean) / (variance + eps) ** 0.5 * slope + bias
    return out.detach()


def test_averages_are_kept_while_training_and_used_otherwise() -> None:
    module, planes = averaged("momentum: 0.75 eps: 0.01").train(), drawn(*SHAPE)
    before = {name: blob.clone() for name, blob in module.named_buffers()}
    module(planes)
    for c, (name, blob) in product(range(3), module.named_buffers()):
        values = planes.detach()[:, c]
        new = {"mean": values.mean(), "variance": values.var(correction=0)}[name]
        torch.testing.assert_close(blob[0, c, 0, 0], 0.75 * before[name][0, c, 0, 0] + 0.25 * new)
    check(module, normalized(planes, module, 0.01, False), planes)
    check(module.eval(), normalized(planes, module, 0.01, True), planes)


def test_frozen_averages_are_used_in_training_and_nothing_is_trained() -> None:
    module, planes = averaged("frozen: true").train(), drawn(*SHAPE)
    assert not list(module.parameters())
    before = [blob.clone() for blob in module.buffers()]
    check(module, normalized(planes, module, 1e-5, True), planes)
    assert all(map(torch.equal, before, module.buffers()))


def test_its_own_statistics_are_used_in_each_phase() -> None:
    module = layer_of("BN", "bn_param { scale_filler { value: 2 } }", SHAPE).double()
    planes = drawn(*SHAPE)
    for training in (True, False):
        check(module.train(training), normalized(planes, module, 1e-9, False), planes)


def test_inference_scales_and_shifts() -> None:
    words = "bn_param { bn_mode: INFERENCE scale_filler { value: 2 } shift_filler { value: 3 } }"
    planes = torch.randn(SHAPE)
    assert torch.equal(layer_of("BN", words, SHAPE)(planes), planes * 2 + 3)


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (f"{FILLERS} frozen: true", {"weight": 2, "bias": 0.5, "mean": 0, "variance": 1}),
        ("shift_filler { value: 0.25 }", {"weight": 0, "bias": 0.25}),
    ],
)
def test_blobs_start_as_the_file_says(words: str, starts: dict[str, float]) -> None:
    state = layer_of("BN", f"bn_param {{ {words} }}", SHAPE).state_dict()
    assert {name: blob.flatten().tolist() for name, blob in state.items()} == {
        name: [start] * 3 for name, start in starts.items()
    }


def test_planes_of_one_value_and_the_meta_device() -> None:
    text = layer("BN", f"bn_param {{ {FILLERS} }}")
    alone = module_of(text, (1, 3, 1, 1))(torch.randn(1, 3, 1, 1))
    torch.testing.assert_close(alone, torch.full((1, 3, 1, 1), 0.5), atol=1e-4, rtol=0)
    assert on_meta(text, SHAPE) == [SHAPE]


BY_PIXEL = "across_spatial: false channel_shared: false"


@pytest.mark.parametrize(
    ("words", "shape", "eps", "start"),
    [
        ("", (), 1e-10, 1.0),
        (BY_PIXEL, (3,), 1e-10, 1.0),
        (f'{BY_PIXEL} eps: 0.5 scale_filler {{ type: "constant" value: 20 }}', (3,), 0.5, 20.0),
    ],
)
def test_normalize(words: str, shape: Shape, eps: float, start: float) -> None:
    """x / sqrt(sum of x² + eps) · scale, of a whole image or of each of its pixels."""
    values = drawn(2, 3, 2, 4)
    plain = values.detach()
    text = layer("Normalize", f"norm_param {{ {words} }}")
    module = module_of(text, (2, 3, 2, 4)).double()
    weight = module.get_parameter("weight")
    assert torch.equal(weight.detach(), torch.full(shape, start).double())
    weight.data += torch.rand(shape).double()
    expected = torch.zeros(2, 3, 2, 4).double()
    for n, i, j in np.ndindex(2, 2, 4):
        part = plain[n, :, i, j] if shape else plain[n]
        length = math.sqrt(sum(float(x) ** 2 for x in part.flatten()) + eps)
        expected[n, :, i, j] = plain[n, :, i, j] / length * weight.detach()
    check(module, expected, values)
    module(values).sum().backward()
    slopes = expected.sum((0, 2, 3) if shape else (0, 1, 2, 3)) / weight.detach()
    torch.testing.assert_close(weight.grad, slopes)
    assert on_meta(text, (2, 3, 2, 4)) == [(2, 3, 2, 4)]


def test_mvn_of_a_plane_of_one_value_has_a_finite_gradient() -> None:
    values = torch.full((1, 2, 3, 3), 5.0, requires_grad=True)
    (slopes,) = torch.autograd.grad(layer_of("MVN", "", (1, 2, 3, 3))(values).sum(), values)
    assert slopes.isfinite().all()


def test_shuffle_channel_is_a_transposition_of_groups() -> None:
    values = torch.randn(2, 6, 2, 3)
    shuffled = layer_of("ShuffleChannel", "shuffle_channel_param { group: 3 }", (2, 6, 2, 3))(
        values
    )
    for group, place in np.ndindex(3, 2):
        assert torch.equal(shuffled[:, place * 3 + group], values[:, group * 2 + place])


def test_axpy() -> None:
    scale, values, others = drawn(2, 3, 1, 1), drawn(2, 3, 2, 4), drawn(2, 3, 2, 4)
    expected = torch.zeros(2, 3, 2, 4).double()
    for n, c in np.ndindex(2, 3):
        expected[n, c] = (scale[n, c, 0, 0] * values[n, c] + others[n, c]).detach()
    module = layer_of("Axpy", "", (2, 3, 1, 1), (2, 3, 2, 4), (2, 3, 2, 4))
    check(module, expected, scale, values, others)


@pytest.mark.parametrize("kind", ["ConvolutionDepthwise", "DepthwiseConvolution"])
def test_depthwise_convolution_has_a_filter_for_each_channel(kind: str) -> None:
    words = "convolution_param { num_output: 3 kernel_size: 3 stride: 2 pad: 1 group: 1 }"
    module = layer_of(kind, words, (2, 3, 5, 6)).double()
    weight, bias = module.parameters()
    assert [tuple(each.shape) for each in (weight, bias)] == [(3, 1, 3, 3), (3,)]
    weight.data, bias.data = torch.randn(3, 1, 3, 3).double(), torch.randn(3).double()
    values = drawn(2, 3, 5, 6)
    padded, expected = functional.pad(values, (1, 1, 1, 1)), torch.zeros(2, 3, 3, 3).double()
    for i, j in np.ndindex(3, 3):
        window = padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
        expected[:, :, i, j] = (window * weight[:, 0]).sum((2, 3)).detach() + bias.detach()
    check(module, expected, values)


def interpolated(planes: Tensor, height: int, width: int) -> Tensor:
    """Bilinear, the corners on each other."""
    rows, columns = planes.shape[2:]
    out = torch.zeros(*planes.shape[:2], height, width).double()
    for i, j in np.ndindex(height, width):
        y = i * (rows - 1) / (height - 1) if height > 1 else 0.0
        x = j * (columns - 1) / (width - 1) if width > 1 else 0.0
        top, left = int(y), int(x)
        below, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
        v, u = y - top, x - left
        above = (1 - u) * planes[:, :, top, left] + u * planes[:, :, top, right]
        under = (1 - u) * planes[:, :, below, left] + u * planes[:, :, below, right]
        out[:, :, i, j] = (1 - v) * above + v * under
    return out


@pytest.mark.parametrize(
    ("words", "height", "width", "kept"),
    [
        ("height: 9 width: 4", 9, 4, slice(None)),
        ("height: 1 width: 1", 1, 1, slice(None)),
        ("zoom_factor: 3", 13, 19, slice(None)),
        ("shrink_factor: 2", 3, 4, slice(None)),
        ("shrink_factor: 2 zoom_factor: 3", 7, 10, slice(None)),
        ("zoom_factor: 2 pad_beg: -1 pad_end: -2", 3, 7, slice(1, -2)),
    ],
)
def test_interp(words: str, height: int, width: int, kept: slice) -> None:
    planes, text = drawn(2, 3, 5, 7), layer("Interp", f"interp_param {{ {words} }}")
    expected = interpolated(planes.detach()[:, :, kept, kept], height, width)
    check(module_of(text, (2, 3, 5, 7)), expected, planes)
    assert on_meta(text, (2, 3, 5, 7)) == [(2, 3, height, width)]


def test_upsample_repeats_each_value() -> None:
    planes = drawn(2, 3, 2, 3)
    expected = planes.detach().repeat_interleave(3, 2).repeat_interleave(3, 3)
    check(layer_of("Upsample", "upsample_param { scale: 3 }", (2, 3, 2, 3)), expected, planes)


@pytest.mark.parametrize("words", ["upsample_h: 5 upsample_w: 6", "scale: 2 pad_out_h: true"])
def test_upsample_by_a_mask_puts_each_value_where_it_was_the_largest(words: str) -> None:
    pool = nn.MaxPool2d(2, ceil_mode=True, return_indices=True)
    largest, places = pool(torch.randn(2, 3, 5, 6))
    text, shape = layer("Upsample", f"upsample_param {{ {words} }}"), (2, 3, 3, 3)
    expected = torch.zeros(2, 3, 5, 6)
    for n, c, i, j in np.ndindex(shape):
        row, column = divmod(int(places[n, c, i, j]), 6)
        expected[n, c, row, column] = largest[n, c, i, j]
    assert torch.equal(module_of(text, shape, shape)(largest, places.float()), expected)
    assert on_meta(text, shape, shape) == [(2, 3, 5, 6)]
