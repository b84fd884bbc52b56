"""Normalize, ShuffleChannel and Axpy against plain loops, and their gradients."""

import math

import torch
from torch import Tensor

from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal


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
    assert "6 channels" in refusal(text.replace("3", "4"), (2, 6, 2, 3))


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
    assert "expected (B, C, 1, 1)" in refusal(layer("Axpy"), (2, 4), (2, 3, 2, 4), (2, 3, 2, 4))


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
        assert "4 channels of 3" in refusal(layer(kind, words.replace("3 k", "4 k")), (2, 3, 5, 6))
