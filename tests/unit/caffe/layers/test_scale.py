"""Scale and Bias, along which axes, with a learned factor or a second bottom."""

import pytest
import torch

from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.alone import net_of, random

SHAPE = (2, 3, 4, 5)

# words, shape of the factor, the same with axes of 1 around
AXES = [
    ("", (3,), (1, 3, 1, 1)),
    ("axis: 0", (2,), (2, 1, 1, 1)),
    ("axis: -1", (5,), (1, 1, 1, 5)),
    ("axis: 1 num_axes: 2", (3, 4), (1, 3, 4, 1)),
    ("axis: 0 num_axes: -1", SHAPE, SHAPE),
    ("num_axes: 0", (), (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("words", "shape", "around"), AXES)
def test_learned(words: str, shape: tuple[int, ...], around: tuple[int, ...]) -> None:
    x = random(*SHAPE)
    scale = net_of("Scale", f"scale_param {{ {words} bias_term: true }}", SHAPE)
    bias = net_of("Bias", f"bias_param {{ {words} }}", SHAPE)
    torch.testing.assert_close(scale(x)["y0"], x)  # they start with 1 and 0
    torch.testing.assert_close(bias(x)["y0"], x)
    factor, summand = random(*shape) if shape else torch.tensor(2.0), torch.full(shape, 3.0)
    with torch.no_grad():
        scale.get_parameter("l.weight").copy_(factor)
        scale.get_parameter("l.bias").copy_(summand)
        bias.get_parameter("l.bias").copy_(factor)
    expected = x * factor.view(around) + summand.view(around)
    torch.testing.assert_close(scale(x)["y0"], expected)
    torch.testing.assert_close(bias(x)["y0"], x + factor.view(around))


@pytest.mark.parametrize(
    ("axis", "shape", "around"),
    [(0, (2, 3), (2, 3, 1, 1)), (1, (3,), (1, 3, 1, 1)), (-2, (4, 5), (1, 1, 4, 5))],
)
def test_a_second_bottom(axis: int, shape: tuple[int, ...], around: tuple[int, ...]) -> None:
    x, by = random(*SHAPE), random(*shape) + 2
    scale = net_of("Scale", f"scale_param {{ axis: {axis} }}", SHAPE, shape)
    bias = net_of("Bias", f"bias_param {{ axis: {axis} }}", SHAPE, shape)
    assert not [*scale.parameters(), *bias.parameters()]
    torch.testing.assert_close(scale(x, by)["y0"], x * by.view(around))
    torch.testing.assert_close(bias(x, by)["y0"], x + by.view(around))


def test_a_second_bottom_and_a_bias() -> None:
    x, by = random(*SHAPE), random(3)
    net = net_of("Scale", "scale_param { bias_term: true }", SHAPE, (3,))
    assert [*dict(net.named_parameters())] == ["l.bias"]
    with torch.no_grad():
        net.get_parameter("l.bias").fill_(2)
    torch.testing.assert_close(net(x, by)["y0"], x * by.view(1, 3, 1, 1) + 2)


def test_refused() -> None:
    with pytest.raises(CaffeError, match="its second bottom is 4; expected 3"):
        net_of("Scale", "", SHAPE, (4,))
    with pytest.raises(CaffeError, match="its bottom has 4"):
        net_of("Bias", "bias_param { axis: 2 num_axes: 3 }", SHAPE)
