"""Functions of one element, each against its formula, with its gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe.layers import elementwise
from firecaffe.caffe.message import CaffeError
from tests.unit.caffe.layers.alone import layer_of, random

SHAPE = (2, 3, 4, 5)

# type, words, formula; x is above 0 where a logarithm or a power needs it
CASES: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("AbsVal", "", lambda x: x * x.sign()),
    ("BNLL", "", lambda x: torch.log1p(torch.exp(x))),
    ("Clip", "clip_param { min: -0.5 max: 1 }", lambda x: x.minimum(x.new_ones(())).clamp(-0.5)),
    ("ELU", "", lambda x: torch.where(x > 0, x, torch.exp(x) - 1)),
    ("ELU", "elu_param { alpha: 2 }", lambda x: torch.where(x > 0, x, 2 * torch.exp(x) - 2)),
    ("Exp", "", torch.exp),
    ("Exp", "exp_param { base: 2 scale: 3 shift: 1 }", lambda x: 2 ** (1 + 3 * x)),
    ("Log", "", lambda x: torch.log(x)),
    ("Log", "log_param { base: 2 scale: 3 shift: 1 }", lambda x: torch.log2(1 + 3 * x)),
    ("PReLU", "", lambda x: torch.where(x > 0, x, x * 0.25)),
    ("Power", "", lambda x: x * 1.0),
    ("Power", "power_param { power: 2 }", lambda x: x * x),
    ("Power", "power_param { power: 1.5 scale: 2 shift: 1 }", lambda x: (1 + 2 * x) ** 1.5),
    ("Power", "power_param { power: 0 scale: 2 }", lambda x: x * 0 + 1),
    ("Power", "power_param { scale: -2 shift: 1 }", lambda x: 1 - 2 * x),
    ("ReLU", "", lambda x: x * (x > 0)),
    ("ReLU", "relu_param { negative_slope: 0.1 }", lambda x: torch.where(x > 0, x, x * 0.1)),
    ("ReLU6", "", lambda x: x.clamp(0, 6)),
    ("Sigmoid", "", lambda x: 1 / (1 + torch.exp(-x))),
    ("Swish", "", lambda x: x / (1 + torch.exp(-x))),
    ("Swish", "swish_param { beta: 2 }", lambda x: x / (1 + torch.exp(-2 * x))),
    ("TanH", "", lambda x: 1 - 2 / (torch.exp(2 * x) + 1)),
    ("Threshold", "threshold_param { threshold: 0.5 }", lambda x: (x > 0.5) * 1.0),
]


@pytest.mark.parametrize(("type_", "words", "formula"), CASES)
def test_formula(type_: str, words: str, formula: Callable[[Tensor], Tensor]) -> None:
    x = random(*SHAPE)
    x = x.abs() + 0.1 if type_ in ("Log", "Power") else x if type_ == "Exp" else x * 3
    x.requires_grad_()
    found, expected = layer_of(type_, words, SHAPE)(x), formula(x)
    torch.testing.assert_close(found, expected.to(x.dtype))
    if type_ != "Threshold" and found.requires_grad:
        gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (found, expected)]
        torch.testing.assert_close(*gradients)


OTHERS = {"Dropout", "Scale", "Bias", "Parameter", "Axpy"}
"""Types in the same file that are no functions of one element alone."""


def test_every_type_has_a_formula() -> None:
    assert {each for each, _, _ in CASES} == {*elementwise.LAYERS} - OTHERS


@pytest.mark.parametrize(("words", "count"), [("", 3), ("prelu_param { channel_shared: true }", 1)])
def test_prelu_has_a_slope_for_each_channel_or_one(words: str, count: int) -> None:
    layer = layer_of("PReLU", words, SHAPE)
    assert isinstance(layer, nn.PReLU)
    assert layer.weight.shape == (count,)
    words = 'prelu_param { filler { type: "constant" value: 0.5 } }'
    filled = layer_of("PReLU", words, SHAPE)
    assert isinstance(filled, nn.PReLU)
    assert (filled.weight == 0.5).all()


def test_refused() -> None:
    with pytest.raises(CaffeError, match="expected above 0, or -1 for e"):
        layer_of("Log", "log_param { base: 0 }", SHAPE)
    with pytest.raises(CaffeError, match="has no channels"):
        layer_of("PReLU", "", (4,))
