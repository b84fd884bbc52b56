"""InnerProduct: over which axes, and its weights either way round."""

import pytest
import torch
from torch import nn

from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.alone import layer_of, net_of, random

SHAPE = (2, 3, 4, 5)
FILLER = 'weight_filler { type: "gaussian" } bias_filler { type: "constant" value: 1 }'


def words(more: str) -> str:
    return f"inner_product_param {{ num_output: 7 {FILLER} {more} }}"


@pytest.mark.parametrize(("axis", "inputs"), [(1, 60), (2, 20), (-1, 5), (0, 120)])
def test_axis(axis: int, inputs: int) -> None:
    x = random(*SHAPE)
    net = net_of("InnerProduct", words(f"axis: {axis}"), SHAPE)
    weight, bias = net.get_parameter("l.weight"), net.get_parameter("l.bias")
    assert weight.shape == (7, inputs)
    torch.testing.assert_close(net(x)["y0"], x.flatten(axis) @ weight.t() + bias)


def test_it_is_a_plain_linear_layer_where_that_will_do() -> None:
    assert type(layer_of("InnerProduct", words(""), SHAPE)) is nn.Linear


@pytest.mark.parametrize(("axis", "inputs"), [(1, 60), (2, 20)])
def test_transposed(axis: int, inputs: int) -> None:
    x = random(*SHAPE)
    net = net_of("InnerProduct", words(f"axis: {axis} transpose: true bias_term: false"), SHAPE)
    weight = net.get_parameter("l.weight")
    assert weight.shape == (inputs, 7)
    assert [*dict(net.named_parameters())] == ["l.weight"]
    torch.testing.assert_close(net(x)["y0"], x.flatten(axis) @ weight)


def test_refused() -> None:
    with pytest.raises(CaffeError, match="num_output is 0"):
        layer_of("InnerProduct", "", SHAPE)
    with pytest.raises(CaffeError, match="its bottom has 4 axes"):
        layer_of("InnerProduct", words("axis: 4"), SHAPE)
    with pytest.raises(CaffeError, match="has 2 bottoms; expected 1"):
        layer_of("InnerProduct", words(""), SHAPE, SHAPE)
