"""Convolution and Deconvolution: each word is torch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.alone import layer_of, net_of, random

SHAPE = (2, 4, 9, 11)

# words of convolution_param, of torch's
CASES: list[tuple[str, dict[str, Any]]] = [
    ("kernel_size: 3", {"kernel_size": (3, 3)}),
    ("kernel_size: 3 kernel_size: 5", {"kernel_size": (3, 5)}),
    ("kernel_h: 2 kernel_w: 3 pad_h: 1 stride_w: 2", {"kernel_size": (2, 3), "padding": (1, 0)}),
    ("kernel_size: 3 pad: 2 stride: 2", {"padding": (2, 2), "stride": (2, 2)}),
    ("kernel_size: 3 dilation: 2 group: 2", {"dilation": (2, 2), "groups": 2}),
    ("kernel_size: 1 bias_term: false engine: CUDNN", {"bias": None}),
]


@pytest.mark.parametrize("type_", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_words(type_: str, words: str, expected: dict[str, Any]) -> None:
    layer: Any = layer_of(type_, f"convolution_param {{ num_output: 6 {words} }}", SHAPE)
    assert type(layer) is (nn.Conv2d if type_ == "Convolution" else nn.ConvTranspose2d)
    assert {name: getattr(layer, name) for name in expected} == expected
    groups = layer.groups
    shape = (6, 4 // groups) if type_ == "Convolution" else (4, 6 // groups)
    assert layer.weight.shape[:2] == shape
    assert not layer.weight.any()  # without a filler Caffe's are 0
    assert layer(random(*SHAPE)).shape[1] == 6


def test_fillers() -> None:
    words = 'weight_filler { type: "constant" value: 3 } bias_filler { type: "constant" value: 2 }'
    layer: Any = layer_of(
        "Convolution", f"convolution_param {{ num_output: 2 kernel_size: 1 {words} }}", SHAPE
    )
    assert (layer.weight == 3).all()
    assert (layer.bias == 2).all()


@pytest.mark.parametrize("type_", ["Convolution", "Deconvolution"])
def test_several_bottoms_share_the_filters(type_: str) -> None:
    words = 'convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } }'
    net = net_of(type_, words, SHAPE, SHAPE, tops=2)
    first, second = random(*SHAPE), random(*SHAPE) + 1
    found = net(first, second)
    weight = net.get_parameter("l.weight")
    function = F.conv2d if type_ == "Convolution" else F.conv_transpose2d
    for name, value in (("y0", first), ("y1", second)):
        torch.testing.assert_close(found[name], function(value, weight))
    assert [*dict(net.named_parameters())] == ["l.weight", "l.bias"]


@pytest.mark.parametrize(
    ("words", "shape", "said"),
    [
        ("kernel_size: 3", (2, 4, 9), "three dimensions are not built"),
        ("kernel_size: 3 group: 3", SHAPE, "multiples of group"),
        ("", SHAPE, "has no kernel_size"),
        ("kernel_h: 3", SHAPE, "both kernel_h and kernel_w"),
        ("kernel_size: 3 kernel_h: 3 kernel_w: 3", SHAPE, "expected one of them"),
        ("kernel_size: 3 axis: 2", SHAPE, "expected axis 1"),
        ("kernel_size: 30", SHAPE, "cannot take 2 x 4 x 9 x 11"),
    ],
)
def test_refused(words: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(CaffeError, match=said) as error:
        layer_of("Convolution", f"convolution_param {{ num_output: 4 {words} }}", shape)
    assert str(error.value).startswith("prototxt:2:")
