"""Flatten, Reshape, Silence, Softmax and Dropout."""

import pytest
import torch
from torch import nn

from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.alone import layer_of, net_of, random

SHAPE = (2, 6, 3, 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", (2, 72)), ("axis: 2", (2, 6, 12)), ("axis: 0 end_axis: -2", (36, 4))],
)
def test_flatten(words: str, expected: tuple[int, ...]) -> None:
    assert net_of("Flatten", f"flatten_param {{ {words} }}", SHAPE).shapes["y0"] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("shape { dim: 0 dim: -1 }", (2, 72)),
        ("shape { dim: 0 dim: 3 dim: 2 dim: 0 dim: -1 }", (2, 3, 2, 4, 3)),
        ("shape { dim: 0 dim: 0 dim: 0 dim: 0 dim: 0 }", None),  # there is no fifth axis
        ("shape { dim: 0 dim: 3 dim: -1 dim: 0 }", (2, 3, 6, 4)),
        ("shape { dim: 3 dim: 2 } axis: 1 num_axes: 1", (2, 3, 2, 3, 4)),
        ("shape { dim: 1 } axis: -1 num_axes: 0", (2, 6, 3, 4, 1)),
        ("shape { dim: 24 dim: 6 }", (24, 6)),
        ("shape { dim: -1 }", (144,)),
        ("shape { dim: 5 dim: -1 }", None),
        ("shape { dim: -1 dim: -1 }", None),
    ],
)
def test_reshape(words: str, expected: tuple[int, ...] | None) -> None:
    words = f"reshape_param {{ {words} }}"
    if expected is None:
        with pytest.raises(CaffeError, match="Reshape 'l'"):
            net_of("Reshape", words, SHAPE)
        return
    net = net_of("Reshape", words, SHAPE)
    assert net.shapes["y0"] == expected
    x = random(*SHAPE)
    assert torch.equal(net(x)["y0"].flatten(), x.flatten())


def test_reshape_takes_any_batch_if_the_file_means_its_own() -> None:
    net = net_of("Reshape", "reshape_param { shape { dim: 2 dim: 9 dim: 8 } }", SHAPE)
    assert net(random(5, 6, 3, 4))["y0"].shape == (5, 9, 8)


def test_silence() -> None:
    assert net_of("Silence", "", SHAPE, SHAPE, tops=0)(random(*SHAPE), random(*SHAPE)) == {}


def test_softmax() -> None:
    x = random(*SHAPE)
    for words, axis in (("", 1), ("softmax_param { axis: -1 }", 3)):
        found = layer_of("Softmax", words, SHAPE)(x)
        torch.testing.assert_close(found, x.exp() / x.exp().sum(axis, keepdim=True))


class TestDropout:
    def test_it_scales_while_training(self) -> None:
        torch.manual_seed(0)
        layer = layer_of("Dropout", "dropout_param { dropout_ratio: 0.75 }", (1000, 100))
        assert isinstance(layer, nn.Dropout)
        found = layer.train()(torch.ones(1000, 100))
        assert found.unique().tolist() == [0, 4]
        assert found.mean().item() == pytest.approx(1, abs=0.05)

    def test_or_else_while_not(self) -> None:
        torch.manual_seed(0)
        words = "dropout_param { dropout_ratio: 0.75 scale_train: false }"
        layer = layer_of("Dropout", words, (1000, 100))
        found = layer.train()(torch.ones(1000, 100))
        assert found.unique().tolist() == [0, 1]
        assert found.mean().item() == pytest.approx(0.25, abs=0.02)
        assert (layer.eval()(torch.ones(2, 2)) == 0.25).all()

    def test_refused(self) -> None:
        with pytest.raises(CaffeError, match="expected 0 to below 1"):
            layer_of("Dropout", "dropout_param { dropout_ratio: 1 }", (2, 2))
