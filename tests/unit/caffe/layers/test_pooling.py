"""Pooling, against the loops of Caffe's own rule, over kernels, strides and paddings."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.pooling import AveragePool, AverageWindows, MaxWindows
from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.made import layer_of, random


def by_loops(x: Tensor, method: str, kernel: int, stride: int, pad: int, up: bool) -> Tensor | None:
    """pooling_layer.cpp in words of its own; None where a window holds nothing."""
    starts = []
    for size in x.shape[2:]:
        left = (size + 2 * pad - kernel) / stride
        count = int(math.ceil(left) if up else math.floor(left)) + 1
        if pad and (count - 1) * stride >= size + pad:
            count -= 1
        starts.append([n * stride - pad for n in range(count)])
        if starts[-1] and starts[-1][-1] >= size:
            return None
    rows, columns = x.shape[2:]
    y = x.new_empty(*x.shape[:2], *map(len, starts))
    for (i, top), (j, left_) in product(*(enumerate(each) for each in starts)):
        bottom, right = min(top + kernel, rows + pad), min(left_ + kernel, columns + pad)
        window = x[:, :, max(top, 0) : min(bottom, rows), max(left_, 0) : min(right, columns)]
        area = (bottom - top) * (right - left_)
        y[:, :, i, j] = window.amax((2, 3)) if method == "MAX" else window.sum((2, 3)) / area
    return y


@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_every_kernel_stride_and_padding(method: str) -> None:
    kinds = set()
    for kernel, stride, pad, up in product((1, 2, 3, 5), (1, 2, 3), range(5), (True, False)):
        if pad >= kernel:
            continue
        for rows, columns in ((5, 6), (7, 8)):
            mode = "CEIL" if up else "FLOOR"
            words = f"kernel_size: {kernel} stride: {stride} pad: {pad} round_mode: {mode}"
            words = f"pooling_param {{ pool: {method} {words} }}"
            x = random(1, 2, rows, columns).double().requires_grad_()
            expected = by_loops(x, method, kernel, stride, pad, up)
            if expected is None:
                with pytest.raises(CaffeError, match="holds nothing"):
                    layer_of("Pooling", words, tuple(x.shape))
                continue
            layer = layer_of("Pooling", words, tuple(x.shape))
            kinds.add(type(layer))
            found = layer(x)
            torch.testing.assert_close(found, expected)
            pull = random(*expected.shape).double()
            gradients = [torch.autograd.grad(each, x, pull)[0] for each in (found, expected)]
            torch.testing.assert_close(*gradients)
    own = MaxWindows if method == "MAX" else AverageWindows
    assert kinds == {own, nn.MaxPool2d if method == "MAX" else AveragePool}


def test_kernels_that_are_no_squares_and_global_ones_that_take_any_size() -> None:
    words = "kernel_h: 2 kernel_w: 5 stride_h: 1 stride_w: 2 pad_h: 1 pad_w: 4"
    x = random(1, 1, 4, 6)
    for method, first in (("MAX", x[0, 0, 0, 0]), ("AVE", x[0, 0, 0, 0] / 10)):
        y = layer_of("Pooling", f"pooling_param {{ pool: {method} {words} }}", (1, 1, 4, 6))(x)
        assert y.shape == (1, 1, 5, 5)
        assert y[0, 0, 0, 0] == pytest.approx(first.item())
    for method, expected in (("MAX", x.amax((2, 3))), ("AVE", x.mean((2, 3)))):
        whole = f"pooling_param {{ pool: {method} global_pooling: true }}"
        y = layer_of("Pooling", whole, (1, 1, 7, 7))(x)
        torch.testing.assert_close(y.flatten(1), expected)


STOCHASTIC = "pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 }"


def test_stochastic_pooling_draws_in_proportion_in_training() -> None:
    torch.manual_seed(0)
    layer = layer_of("Pooling", STOCHASTIC, (1, 20_000, 2, 2)).train()
    x = torch.tensor([0.1, 0.2, 0.3, 0.4]).view(1, 1, 2, 2).expand(1, 20_000, 2, 2)
    shares = [(layer(x) == value).double().mean().item() for value in (0.1, 0.2, 0.3, 0.4)]
    assert shares == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.02)


def test_the_gradient_of_stochastic_pooling_goes_to_the_drawn_one() -> None:
    torch.manual_seed(0)
    x = random(2, 3, 5, 5).abs().requires_grad_()
    y = layer_of("Pooling", STOCHASTIC, (2, 3, 5, 5)).train()(x)
    assert y.shape == (2, 3, 3, 3)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.sum() == y.numel()
    torch.testing.assert_close((gradient * x).sum(), y.sum())


def test_stochastic_pooling_is_the_weighted_mean_else() -> None:
    x, layer = random(1, 1, 3, 2).abs(), layer_of("Pooling", STOCHASTIC, (1, 1, 3, 2)).eval()
    expected = [each.square().sum() / each.sum() for each in (x[..., :2, :], x[..., 2:, :])]
    torch.testing.assert_close(layer(x).flatten(), torch.stack(expected))
    assert not layer(x * 0).any()
