"""Layers where the records of a real Caffe say nothing: other forms, starts, training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe import text
from firecaffe.caffe.layers import elementwise
from firecaffe.caffe.layers.batch_norm import BatchNorm
from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.caffe.net import Net
from firecaffe.gradients.buffers import BufferChanges
from tests.unit.caffe.layers.made import layer, layer_of, net_of, own, random
from tools.caffe_goldens.cases import inputs
from tools.caffe_goldens.cases import layer as layer_between
from tools.caffe_goldens.layers import FAMILIES

SHAPE = (2, 3, 4, 5)
ONES = 'weight_filler { type: "constant" value: 3 } bias_filler { type: "constant" value: 2 }'

# type, words, formula
FORMULAS: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("Clip", "clip_param { min: -0.5 max: 1 }", lambda x: x.minimum(x.new_ones(())).clamp(-0.5)),
    ("Power", "", lambda x: x * 1.0),
    ("ReLU6", "", lambda x: x.clamp(0, 6)),
    ("Swish", "", lambda x: x / (1 + torch.exp(-x))),
]


@pytest.mark.parametrize(("kind", "words", "formula"), FORMULAS)
def test_formula(kind: str, words: str, formula: Callable[[Tensor], Tensor]) -> None:
    x = (random(*SHAPE) * 3).requires_grad_()
    found, expected = layer_of(kind, words, SHAPE)(x), formula(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_every_function_of_one_element_has_an_oracle() -> None:
    recorded = " ".join(case.net for cases in FAMILIES.values() for case in cases)
    others = [kind for kind in elementwise.LAYERS if f'"{kind}"' not in recorded]
    assert {*others} <= {kind for kind, _, _ in FORMULAS} | {"Axpy"}


@pytest.mark.parametrize(
    ("kind", "words", "starts"),
    [
        ("Convolution", "num_output: 2 kernel_size: 1", {"weight": 0, "bias": 0}),
        ("Deconvolution", "num_output: 2 kernel_size: 1", {"weight": 0, "bias": 0}),
        ("Convolution", f"num_output: 2 kernel_size: 1 {ONES}", {"weight": 3, "bias": 2}),
        ("InnerProduct", f"num_output: 2 {ONES}", {"weight": 3, "bias": 2}),
        ("PReLU", "", {"weight": 0.25}),
        ("PReLU", 'filler { type: "constant" value: 0.5 }', {"weight": 0.5}),
        ("Scale", "bias_term: true", {"weight": 1, "bias": 0}),
        ("Bias", "", {"bias": 0}),
    ],
)
def test_weights_start_as_their_fillers_say(
    kind: str, words: str, starts: dict[str, float]
) -> None:
    parameters = layer_of(kind, own(kind, words), SHAPE).named_parameters()
    found = {name: set(each.flatten().tolist()) for name, each in parameters}
    assert found == {name: {value} for name, value in starts.items()}


def test_layers_are_those_that_other_code_knows() -> None:
    for kind, words, known in (
        ("Convolution", "num_output: 6 kernel_size: 3", nn.Conv2d),
        ("Deconvolution", "num_output: 6 kernel_size: 3", nn.ConvTranspose2d),
        ("InnerProduct", "num_output: 6", nn.Linear),
        ("Dropout", "", nn.Dropout),
    ):
        assert type(layer_of(kind, own(kind, words), SHAPE)) is known


def test_several_bottoms_share_the_filters_of_a_deconvolution() -> None:
    words = 'convolution_param { num_output: 3 kernel_size: 3 weight_filler { type: "xavier" } }'
    net = net_of(layer("Deconvolution", words, tops=2), SHAPE, SHAPE)
    first, second = random(*SHAPE), random(*SHAPE) + 1
    for found, value in zip(net(first, second).values(), (first, second), strict=True):
        expected = nn.functional.conv_transpose2d(value, net.get_parameter("it.weight"))
        torch.testing.assert_close(found, expected)
    assert [*dict(net.named_parameters())] == ["it.weight", "it.bias"]


def test_a_transposed_product_from_another_axis() -> None:
    words = (
        'num_output: 7 axis: 2 transpose: true bias_term: false weight_filler { type: "xavier" }'
    )
    module: Any = layer_of("InnerProduct", f"inner_product_param {{ {words} }}", SHAPE)
    assert module.weight.shape == (20, 7)
    x = random(*SHAPE)
    torch.testing.assert_close(module(x), x.flatten(2) @ module.weight)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dim: 0 dim: 3 dim: 2 dim: 0 dim: -1", (2, 3, 2, 4, 3)),
        ("dim: 0 dim: 3 dim: -1 dim: 0", (2, 3, 6, 4)),
        ("dim: 24 dim: 6", (24, 6)),
        ("dim: -1", (144,)),
    ],
)
def test_reshape(words: str, expected: tuple[int, ...]) -> None:
    net = net_of(layer("Reshape", f"reshape_param {{ shape {{ {words} }} }}"), (2, 6, 3, 4))
    assert net.shapes["y0"] == expected
    x = random(2, 6, 3, 4)
    assert torch.equal(net(x)["y0"].flatten(), x.flatten())


def test_reshape_takes_any_batch_if_the_file_means_its_own() -> None:
    words = "reshape_param { shape { dim: 2 dim: 9 dim: 8 } }"
    assert layer_of("Reshape", words, (2, 6, 3, 4))(random(5, 6, 3, 4)).shape == (5, 9, 8)


@pytest.mark.parametrize(("scaled", "high", "mean"), [("true", 4, 1), ("false", 1, 0.25)])
def test_dropout_in_training(scaled: str, high: float, mean: float) -> None:
    torch.manual_seed(0)
    words = f"dropout_param {{ dropout_ratio: 0.75 scale_train: {scaled} }}"
    module = layer_of("Dropout", words, (1000, 100))
    found = module.train()(torch.ones(1000, 100))
    assert found.unique().tolist() == [0, high]
    assert found.mean().item() == pytest.approx(mean, rel=0.05)
    assert (module.eval()(torch.ones(2, 2)) == mean).all()


def test_of_equal_ones_the_second_has_the_gradient() -> None:
    values = [torch.ones(1, 2).requires_grad_() for _ in range(3)]
    net = net_of(layer("Eltwise", "eltwise_param { operation: MAX }"), *[(1, 2)] * 3)
    gradients = torch.autograd.grad(net(*values)["y0"].sum(), values)
    assert [each.tolist() for each in gradients] == [[[0, 0]], [[1, 1]], [[0, 0]]]


@pytest.mark.parametrize("operation", ["PROD", "SUM", "MAX"])
def test_eltwise_in_place_is_as_with_a_top_of_its_own(operation: str) -> None:
    """In a real Caffe it is not: of PROD the gradients, of SUM and MAX the values are wrong."""
    found = []
    for top in ("a", "c"):
        words = f"eltwise_param {{ operation: {operation} }}"
        parts = layer_between("Power", "x", "a") + layer_between("Power", "z", "b")
        parts += layer_between("Eltwise", "a b", top, words)
        torch.manual_seed(3)
        values = [torch.randn(2, 4).requires_grad_() for _ in range(2)]
        y = Net(text.parse(inputs(x=(2, 4), z=(2, 4)) + parts))(*values)[top]
        found.append([y, *torch.autograd.grad(y.square().sum(), values)])
    assert all(map(torch.equal, *found))


def test_split_adds_the_gradients() -> None:
    x = random(2, 3).requires_grad_()
    first, second = net_of(layer("Split", tops=2), (2, 3))(x).values()
    (gradient,) = torch.autograd.grad((first + 2 * second).sum(), x)
    assert (gradient == 3).all()


def batch_norm(shape: tuple[int, ...]) -> BatchNorm:
    module = layer_of("BatchNorm", "", shape)
    assert isinstance(module, BatchNorm)
    return module.train()


def test_batch_norm_of_lines_and_of_one_value() -> None:
    assert batch_norm((6,))(random(6)).shape == (6,)
    alone, x = batch_norm((1, 5)), random(1, 5)
    assert not alone(x).any()
    torch.testing.assert_close(alone.mean, x[0])


def test_a_step_adds_the_mean_of_its_micro_batches() -> None:
    """So that it does not matter who has computed which."""
    x = random(8, *SHAPE[1:])
    module = batch_norm(SHAPE)
    module(random(*SHAPE))
    start = module.mean.clone()
    network = nn.Sequential(module)
    changes = BufferChanges(network)
    changes.begin_step()
    totals = changes.no_changes()
    for number, part in enumerate(torch.split(x, 2)):
        changes.begin_micro_batch()
        network(part)
        totals = [a + b for a, b in zip(totals, changes.take(number, 2.0), strict=True)]
    changes.finish_step(totals, 8.0)
    torch.testing.assert_close(module.mean, 0.999 * start + x.mean((0, 2, 3)))
    torch.testing.assert_close(module.factor, torch.tensor([1.999]))


@pytest.mark.parametrize("channels", [1, 4, 9])
def test_local_response_norm_is_torchs_with_its_gradient(channels: int) -> None:
    x = (random(2, channels, 3, 5) * 10).requires_grad_()
    found = []
    for norm in (LocalResponseNorm(), nn.LocalResponseNorm(5)):
        y = norm(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    torch.testing.assert_close(found[0], found[1])
