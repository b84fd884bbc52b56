"""Weights start where the authors' files start them."""

from math import sqrt

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


def filled(words: str, *shape: int) -> Tensor:
    weight = torch.empty(shape)
    fillers.filler(parse(words))(weight)
    return weight


@pytest.mark.parametrize("kind", fillers.FILLERS)
def test_words_of_other_fillers_are_left_unread(kind: str) -> None:
    words = parse(f'type: "{kind}" value: 1 min: 0 max: 1 mean: 0 std: 1 variance_norm: FAN_IN')
    fillers.filler(words)
    assert list(words.unread()) == []
    strange = parse(f'type: "{kind}" orientations: 4')
    fillers.filler(strange)
    assert [name for name, _ in strange.unread()] == ["orientations"]


def test_nothing_is_a_constant() -> None:
    assert not filled("", 3, 4).any()
    assert not filled('type: "constant"', 3).any()
    assert (filled("value: 0.5", 3) == 0.5).all()
    weight = torch.empty(3)
    fillers.filler(parse(""), 0.25)(weight)
    assert (weight == 0.25).all()


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
    uniform, normal = (
        filled(f'type: "{kind}" variance_norm: {norm}', 64, 32, 5, 5) for kind in ("xavier", "msra")
    )
    assert uniform.var().item() == pytest.approx(1 / fan, rel=0.03)
    assert 0.999 * sqrt(3 / fan) < uniform.abs().max().item() <= sqrt(3 / fan)
    assert normal.var().item() == pytest.approx(2 / fan, rel=0.03)
    for weight in (uniform, normal):
        assert abs(weight.mean().item()) < 5 * weight.std().item() / sqrt(weight.numel())


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
    ("words", "part"),
    [
        ('type: "orthogonal"', 'no filler "orthogonal"; known: constant'),
        ('type: "gaussian" std: -1', "std is -1; expected 0 or more"),
        ('type: "gaussian" std: nan', "std is nan"),
        ('type: "uniform" min: 1 max: -1', "from 1 to -1"),
        ('type: "uniform" max: 1e39', "to 1e\\+39"),
        ('type: "xavier" variance_norm: 7', "expected one of FAN_IN"),
        ('type: "bilinear"', "square filters; found weights of"),
    ],
)
def test_refused(words: str, part: str) -> None:
    with pytest.raises(CaffeError, match=part):
        filled(words, 4, 4, 2, 3)


# network, standard deviation of weights, their biases, layers: from the authors' files
STARTS: list[tuple[str, float, float | None, str]] = [
    ("lenet", 1 / 5, 0, "conv1"),
    ("lenet", 1 / sqrt(800), 0, "ip1"),
    ("lenet_300_100", 1 / 28, 0, "ip1"),
    ("lenet_300_100", 1 / 10, 0, "ip3"),
    ("cifar10_quick", 0.0001, 0, "conv1"),
    ("cifar10_quick", 0.01, 0, "conv2 conv3"),
    ("cifar10_quick", 0.1, 0, "ip1 ip2"),
    ("cifar10_full", 0.0001, 0, "conv1"),
    ("cifar10_full", 0.01, 0, "conv3 ip1"),
    ("nin_cifar", 0.05, 0, "conv1 cccp1 cccp6"),
    ("nin", 0.01, 0, "conv1 conv2 conv3 cccp8"),
    ("nin", 0.05, 0, "conv4 cccp1 cccp7"),
    ("alexnet", 0.01, 0, "features.0 features.8 classifier.6"),
    ("alexnet", 0.01, 0.1, "features.4 features.10 features.12"),
    ("alexnet", 0.005, 0.1, "classifier.0 classifier.3"),
    ("caffenet", 0.01, 0, "features.0 features.8 classifier.6"),
    ("caffenet", 0.01, 1, "features.4 features.10 features.12"),
    ("caffenet", 0.005, 1, "classifier.0 classifier.3"),
    ("googlenet", 1 / sqrt(147), 0.2, "conv1.conv"),
    ("googlenet", 1 / sqrt(16 * 25), 0.2, "inception3a.branch3.1.conv"),
    ("googlenet", 1 / sqrt(512), 0.2, "aux1.conv.conv"),
    ("googlenet", 1 / sqrt(2048), 0.2, "aux2.fc1"),
    ("googlenet", 1 / 32, 0, "aux1.fc2 aux2.fc2 fc"),
    ("squeezenet1_0", 1 / sqrt(147), 0, "features.0"),
    ("squeezenet1_0", 1 / 12, 0, "features.3.expand3x3"),
    ("squeezenet1_0", 0.01, 0, "classifier.1"),
    ("resnet18", sqrt(2 / (64 * 49)), None, "conv1"),
    ("vgg_small_bn", sqrt(2 / (16 * 9)), None, "features.0"),
    ("vgg_small_bn", sqrt(2 / (256 * 9)), None, "features.25"),
    ("vgg_small_bn", 0.01, 0, "classifier"),
]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in STARTS))
def test_starts_of_the_networks(name: str) -> None:
    network = build_model(name, num_classes=10)
    starts = [row for row in STARTS if row[0] == name]
    for layer_name, std, bias in ((layer, *row[1:3]) for row in starts for layer in row[3].split()):
        layer = network.get_submodule(layer_name)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        tolerance = 5 / sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(std, rel=tolerance), layer_name
        biases = None if layer.bias is None else set(layer.bias.tolist())
        assert biases == (None if bias is None else {torch.tensor(bias).float().item()}), layer_name
