"""Weights start where the authors' files start them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from firecaffe.caffe import fillers
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import parse
from firecaffe.models import build_model


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# weight shape, filler, standard deviation by its formula
@pytest.mark.parametrize(
    ("shape", "fill", "std"),
    [
        ((200, 100), fillers.gaussian(0.01), 0.01),
        ((64, 32, 5, 5), fillers.gaussian(0.05), 0.05),
        ((200, 100), fillers.xavier, 1 / math.sqrt(100)),
        ((64, 32, 5, 5), fillers.xavier, 1 / math.sqrt(800)),
        ((200, 100), fillers.msra, math.sqrt(2 / 100)),
        ((64, 32, 5, 5), fillers.msra, math.sqrt(2 / 800)),
        ((64, 32, 5, 5), fillers.msra_fan_out, math.sqrt(2 / 1600)),
    ],
)
def test_standard_deviation(
    shape: tuple[int, ...], fill: Callable[[Tensor], None], std: float
) -> None:
    weight = torch.empty(shape)
    fill(weight)
    n = weight.numel()
    assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(n)


@pytest.mark.parametrize("kind", fillers.FILLERS)
def test_words_of_other_fillers_are_left_unread(kind: str) -> None:
    words = parse(f'type: "{kind}" value: 1 min: 0 max: 1 mean: 0 std: 1 variance_norm: FAN_IN')
    fillers.filler(words)
    assert list(words.unread()) == []
    strange = parse(f'type: "{kind}" orientations: 4')
    fillers.filler(strange)
    assert [name for name, _ in strange.unread()] == ["orientations"]


def test_xavier_is_uniform_up_to_its_bound() -> None:
    weight = torch.empty(100, 300)
    fillers.xavier(weight)
    bound = math.sqrt(3 / 300)
    assert 0.999 * bound < weight.abs().max().item() <= bound
    assert (weight.abs() < bound / 2).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_fill_sets_the_bias_and_takes_a_layer_without_one() -> None:
    layer = nn.Conv2d(2, 3, 3)
    fillers.fill(layer, fillers.xavier, bias=0.2)
    assert layer.bias is not None
    assert (layer.bias == 0.2).all()
    fillers.fill(nn.Linear(2, 3, bias=False), fillers.xavier, bias=0.2)


# layer, standard deviation of its weights, its biases: from the authors' files
STARTS: dict[str, list[tuple[str, float, float | None]]] = {
    "lenet": [("conv1", 1 / 5, 0), ("ip1", 1 / math.sqrt(800), 0)],
    "lenet_300_100": [("ip1", 1 / 28, 0), ("ip3", 1 / 10, 0)],
    "cifar10_quick": [
        ("conv1", 0.0001, 0),
        ("conv2", 0.01, 0),
        ("conv3", 0.01, 0),
        ("ip1", 0.1, 0),
        ("ip2", 0.1, 0),
    ],
    "cifar10_full": [("conv1", 0.0001, 0), ("conv3", 0.01, 0), ("ip1", 0.01, 0)],
    "nin_cifar": [("conv1", 0.05, 0), ("cccp1", 0.05, 0), ("cccp6", 0.05, 0)],
    "nin": [
        ("conv1", 0.01, 0),
        ("conv2", 0.01, 0),
        ("conv3", 0.01, 0),
        ("conv4", 0.05, 0),
        ("cccp1", 0.05, 0),
        ("cccp7", 0.05, 0),
        ("cccp8", 0.01, 0),
    ],
    "alexnet": [
        ("features.0", 0.01, 0),
        ("features.4", 0.01, 0.1),
        ("features.8", 0.01, 0),
        ("features.10", 0.01, 0.1),
        ("features.12", 0.01, 0.1),
        ("classifier.0", 0.005, 0.1),
        ("classifier.3", 0.005, 0.1),
        ("classifier.6", 0.01, 0),
    ],
    "caffenet": [
        ("features.0", 0.01, 0),
        ("features.4", 0.01, 1),
        ("features.8", 0.01, 0),
        ("features.10", 0.01, 1),
        ("features.12", 0.01, 1),
        ("classifier.0", 0.005, 1),
        ("classifier.3", 0.005, 1),
        ("classifier.6", 0.01, 0),
    ],
    "googlenet": [
        ("conv1.conv", 1 / math.sqrt(147), 0.2),
        ("inception3a.branch3.1.conv", 1 / math.sqrt(16 * 25), 0.2),
        ("aux1.conv.conv", 1 / math.sqrt(512), 0.2),
        ("aux2.fc1", 1 / math.sqrt(2048), 0.2),
        ("aux2.fc2", 1 / 32, 0),
        ("aux1.fc2", 1 / 32, 0),
        ("fc", 1 / 32, 0),
    ],
    "squeezenet1_0": [
        ("features.0", 1 / math.sqrt(147), 0),
        ("features.3.expand3x3", 1 / 12, 0),
        ("classifier.1", 0.01, 0),
    ],
    "resnet18": [("conv1", math.sqrt(2 / (64 * 49)), None)],
    "vgg_small_bn": [
        ("features.0", math.sqrt(2 / (16 * 9)), None),
        ("features.25", math.sqrt(2 / (256 * 9)), None),
        ("classifier", 0.01, 0),
    ],
}


@pytest.mark.parametrize("name", STARTS)
def test_starts_of_the_networks(name: str) -> None:
    network = build_model(name, num_classes=10)
    for layer_name, std, bias in STARTS[name]:
        layer = network.get_submodule(layer_name)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        tolerance = 5 / math.sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(std, rel=tolerance), layer_name
        if bias is None:
            assert layer.bias is None
        else:
            assert layer.bias is not None
            assert (layer.bias == torch.tensor(bias, dtype=torch.float32)).all(), layer_name


def filled(words: str, *shape: int) -> Tensor:
    weight = torch.empty(shape)
    fillers.filler(parse(words))(weight)
    return weight


def test_nothing_is_a_constant() -> None:
    assert not filled("", 3, 4).any()
    weight = torch.empty(3)
    fillers.filler(parse(""), 0.25)(weight)
    assert (weight == 0.25).all()
    assert not filled('type: "constant"', 3).any()
    assert (filled("value: 0.5", 3) == 0.5).all()


def test_numbers_that_are_drawn() -> None:
    weight = filled('type: "uniform" min: 2 max: 3', 50, 100)
    assert 2 <= weight.min() < 2.01
    assert 2.99 < weight.max() <= 3
    assert filled('type: "uniform"', 1000).max() > 0.98
    weight = filled('type: "gaussian" mean: 3 std: 0.5', 100, 100)
    assert weight.mean().item() == pytest.approx(3, abs=0.03)
    assert weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert filled('type: "gaussian"', 10_000).std().item() == pytest.approx(1, rel=0.05)
    weight = filled('type: "gaussian" sparse: 20', 100, 200)
    assert (weight != 0).float().mean().item() == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    ("norm", "fan"), [("FAN_IN", 800), ("FAN_OUT", 1600), ("AVERAGE", 1200), ("2", 1200)]
)
def test_fans(norm: str, fan: int) -> None:
    for kind, variance in (("xavier", 1 / fan), ("msra", 2 / fan)):
        weight = filled(f'type: "{kind}" variance_norm: {norm}', 64, 32, 5, 5)
        assert weight.var().item() == pytest.approx(variance, rel=0.05)


def test_positive_unitball() -> None:
    weight = filled('type: "positive_unitball"', 6, 3, 2, 2)
    assert weight.min() >= 0
    torch.testing.assert_close(weight.flatten(1).sum(1), torch.ones(6))


@pytest.mark.parametrize("factor", [2, 3])
def test_bilinear_interpolates(factor: int) -> None:
    """A ramp that a deconvolution enlarges is a ramp, within its edges."""
    size = 2 * factor - factor % 2
    weight = filled('type: "bilinear"', 1, 1, size, size)
    ramp = torch.arange(6.0).expand(1, 1, 6, 6)
    pad = (factor - 1) // 2 if factor % 2 else factor // 2
    large = nn.functional.conv_transpose2d(ramp, weight, stride=factor, padding=pad)
    steps = large[0, 0, 2 * factor, 2 * factor : 4 * factor].diff()
    torch.testing.assert_close(steps, torch.full_like(steps, 1 / factor))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ('type: "orthogonal"', 'no filler "orthogonal"; known: constant'),
        ('type: "xavier" variance_norm: 7', "expected one of FAN_IN"),
        ('type: "bilinear"', "square filters; found weights of"),
    ],
)
def test_refused(words: str, said: str) -> None:
    with pytest.raises(CaffeError, match=said):
        filled(words, 4, 4, 2, 3)
