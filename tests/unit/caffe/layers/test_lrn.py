"""LRN, against the formula of Krizhevsky et al. 2012, and within a channel."""

import pytest
import torch

from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.alone import layer_of, random

SHAPE = (2, 7, 5, 6)


def test_across_channels() -> None:
    x = random(*SHAPE)
    y = layer_of("LRN", "lrn_param { local_size: 3 alpha: 0.6 beta: 0.5 k: 2 }", SHAPE)(x)
    for channel in range(7):
        around = x[:, max(0, channel - 1) : channel + 2].square().sum(1)
        torch.testing.assert_close(y[:, channel], x[:, channel] / (2 + 0.2 * around) ** 0.5)


def test_within_a_channel() -> None:
    x = random(*SHAPE)
    words = "lrn_param { local_size: 3 alpha: 0.9 beta: 0.5 k: 5 norm_region: WITHIN_CHANNEL }"
    y = layer_of("LRN", words, SHAPE)(x)
    inside = x[:, :, 1:4, 2:5].square().sum((2, 3))
    torch.testing.assert_close(y[:, :, 2, 3], x[:, :, 2, 3] / (1 + 0.1 * inside) ** 0.5)
    corner = x[:, :, :2, :2].square().sum((2, 3))
    torch.testing.assert_close(y[:, :, 0, 0], x[:, :, 0, 0] / (1 + 0.1 * corner) ** 0.5)


def test_defaults_are_caffes() -> None:
    x = random(*SHAPE)
    named = layer_of("LRN", "lrn_param { local_size: 5 alpha: 1 beta: 0.75 k: 1 }", SHAPE)
    torch.testing.assert_close(layer_of("LRN", "", SHAPE)(x), named(x))


def test_an_even_size_is_refused() -> None:
    with pytest.raises(CaffeError, match="expected an odd number"):
        layer_of("LRN", "lrn_param { local_size: 4 }", SHAPE)
