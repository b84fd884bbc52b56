"""The profile: counted by hand, beside published figures, and as people read it."""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from firecaffe.api.profile import render
from firecaffe.models import MODELS, build_model
from firecaffe.models.googlenet import googlenet, googlenet_bn
from firecaffe.models.layer_costs import Profile, profile


class Tied(nn.Module):
    """A convolution and a ReLU called twice, and a second layer with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.relu = nn.ReLU()
        self.twin = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.twin.weight = self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.twin(self.relu(self.conv(self.relu(self.conv(x)))))
        return out


class Scale(nn.Module):
    """A parameter of a module that has parts as well, and a part that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.fc = nn.Linear(3, 2)
        self.unused = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.flatten(1) * self.gain)
        return out


def test_rows_of_a_convolution_by_hand() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.Flatten())
    conv, relu, flatten = profile(network, (3, 9, 9), 2).layers
    assert (conv.name, conv.kind, conv.output_shape) == ("0", "Conv2d", (2, 8, 3, 3))
    assert (conv.parameters, conv.weight_bytes) == (8 * 3 * 25 + 8, 4 * conv.parameters)
    assert conv.input_activation_bytes == 4 * 2 * 3 * 9 * 9
    assert conv.output_activation_bytes == 4 * 2 * 8 * 3 * 3
    assert (conv.macs, conv.forward_backward_flops) == (2 * 72 * 75, 6 * conv.macs)
    assert (relu.macs, relu.parameters, relu.output_shape) == (0, 0, (2, 8, 3, 3))
    assert flatten.output_shape == (2, 72)


def test_groups_divide_the_macs() -> None:
    macs = [profile(nn.Conv2d(4, 8, 3, groups=g), (4, 5, 5), 1).macs for g in (1, 2, 4)]
    assert macs == [8 * 9 * 4 * 9, 8 * 9 * 2 * 9, 8 * 9 * 1 * 9]


def test_data_bytes_are_the_inputs_of_convolutions_and_fully_connected_layers() -> None:
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5)
    )
    assert profile(network, (1, 4, 4), 3).data_bytes == 4 * 3 * (16 + 8)


def test_shared_layers_have_a_row_per_call_and_count_once() -> None:
    volumes = profile(Tied(), (2, 4, 4), 1)
    assert [row.name for row in volumes.layers] == ["conv", "relu", "conv#2", "relu#2", "twin"]
    assert [row.parameters for row in volumes.layers] == [38, 0, 0, 0, 0]
    assert volumes.parameters == 38
    assert volumes.macs == 3 * (2 * 16 * 2 * 9)
    assert volumes.data_bytes == 3 * 4 * (2 * 16)


def test_parameters_outside_of_called_leaves_are_in_the_totals() -> None:
    volumes = profile(Scale(), (3, 1, 1), 1)
    assert {row.name: row.parameters for row in volumes.layers} == {"fc": 8, "": 3}
    assert volumes.parameters == 3 + 8 + 42


def test_bytes_follow_the_precision() -> None:
    single, half = (
        profile(nn.Conv2d(1, 1, 1).to(t), (1, 2, 2), 1) for t in (torch.float32, torch.bfloat16)
    )
    assert single.weight_bytes == 2 * half.weight_bytes
    assert single.data_bytes == 2 * half.data_bytes


def test_module_is_left_as_it_was() -> None:
    network = build_model("googlenet_small_bn")
    network.eval()
    dropout = network.get_submodule("dropout")
    dropout.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    rng = torch.get_rng_state()
    first = profile(network, (3, 32, 32), 4)
    assert [part.training for part in network.modules()] == [
        part is dropout for part in network.modules()
    ]
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(part._forward_hooks for part in network.modules())
    assert profile(network, (3, 32, 32), 4) == first


def test_hooks_and_mode_are_restored_after_a_failure() -> None:
    network = build_model("lenet").eval()
    with pytest.raises(RuntimeError):
        profile(network, (1, 32, 32), 1)
    assert not any(part.training or part._forward_hooks for part in network.modules())


def watch_for_memory(network: nn.Module) -> None:
    def check(part: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        assert all(tensor.is_meta for tensor in (*inputs, *outputs, *part.parameters()))

    for part in network.modules():
        part.register_forward_hook(check)


@pytest.mark.parametrize("name", MODELS)
def test_takes_no_memory_and_rows_add_up_to_the_totals(name: str) -> None:
    with torch.device("meta"):
        network = build_model(name)
    watch_for_memory(network)
    volumes = profile(network, MODELS[name].input_CHW, 1024)
    assert all(tensor.is_meta for tensor in network.state_dict().values())
    assert sum(row.parameters for row in volumes.layers) == volumes.parameters
    assert sum(row.weight_bytes for row in volumes.layers) == volumes.weight_bytes
    assert sum(row.macs for row in volumes.layers) == volumes.macs
    assert sum(row.forward_backward_flops for row in volumes.layers) == 6 * volumes.macs


def test_takes_no_memory_for_a_network_that_has_its_own() -> None:
    network = build_model("googlenet_small_bn")
    watch_for_memory(network)
    # 53 TB of images, were they there.
    assert profile(network, (3, 32, 32), 2**32).layers[0].macs > 2**50
    assert not any(tensor.is_meta for tensor in network.state_dict().values())


def test_as_dict_survives_json() -> None:
    volumes: Profile = profile(build_model("lenet"), (1, 28, 28), 2)
    plain = json.loads(json.dumps(volumes.as_dict()))
    assert plain["macs"] == volumes.macs
    assert plain["input_CHW"] == [1, 28, 28]
    assert plain["layers"][0]["output_shape"] == [2, 20, 24, 24]
    names = [row["name"] for row in plain["layers"]]
    assert names == ["conv1", "pool1", "conv2", "pool2", "flatten", "ip1", "relu1", "ip2"]


@functools.cache
def of_one_image(name: str) -> Profile:
    with torch.device("meta"):
        network = build_model(name)
    return profile(network, MODELS[name].input_CHW, 1)


# VGG, SqueezeNet, ResNet, googlenet_bn: torchvision's num_params. Others: from the authors' files.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet", 431_080),
        ("lenet_300_100", 266_610),
        ("cifar10_quick", 145_578),
        ("cifar10_full", 89_578),
        ("nin_cifar", 966_986),
        ("nin", 7_595_176),
        ("alexnet", 60_965_224),
        ("alexnet_ungrouped", 62_378_344),
        ("alexnet_owt", 61_100_840),
        ("caffenet", 60_965_224),
        ("googlenet", 13_378_280),
        ("googlenet_bn", 13_004_888),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        # convolutions without biases, a scale and a shift for each of 944 channels, a classifier
        ("vgg_small_bn", 1_166_256 + 2 * 944 + 2_570),
        ("squeezenet1_0", 1_248_424),
        ("squeezenet1_1", 1_235_496),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    assert of_one_image(name).parameters == parameters


@pytest.mark.parametrize(
    ("build", "parameters"), [(googlenet, 6_998_552), (googlenet_bn, 6_624_904)]
)
def test_parameters_without_heads(build: Callable[..., nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        network = build(aux_logits=False)
    assert profile(network, (3, 224, 224), 1).parameters == parameters


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("lenet", 2.293),
        ("lenet_300_100", 0.266),
        # 5x5x3x32 at 32x32, 5x5x32x32 at 16x16, 5x5x32x64 at 8x8, then 1024 to 64 to 10
        ("cifar10_quick", 12.354),
        ("cifar10_full", 12.298),
        ("nin_cifar", 222.5),
        ("nin", 1100.2),
        ("alexnet", 724.4),
        ("caffenet", 724.4),
        ("googlenet", 1591.0),
        ("vgg19", 19632),
        # torchvision's _ops, in G
        ("vgg16", 15470),
        ("squeezenet1_0", 819),
        ("squeezenet1_1", 349),
        ("resnet18", 1814),
        ("resnet50", 4089),
        ("resnet152", 11514),
    ],
)
def test_forward_macs_of_one_image(name: str, millions: float) -> None:
    assert of_one_image(name).macs / 1e6 == pytest.approx(millions, rel=1e-3)


def test_macs_of_googlenet_bn_without_heads_are_torchvisions() -> None:
    with torch.device("meta"):
        macs = profile(googlenet_bn(aux_logits=False), (3, 224, 224), 1).macs
    assert macs / 1e9 == pytest.approx(1.498, abs=5e-4)


# FireCaffe's volumes, recomputed: MB of weights, MB of inputs, TFLOP.
@pytest.mark.parametrize(
    ("name", "side", "weights", "data", "tera"),
    [
        ("nin", 224, 30.4, 5793, 6.76),
        ("nin", 227, 30.4, 5895, None),
        ("alexnet", 224, 243.9, 1683, 4.43),
        ("alexnet", 227, 243.9, 1700, None),
        ("alexnet_ungrouped", 224, 249.5, 1683, 6.95),
        ("alexnet_ungrouped", 227, 249.5, 1700, None),
        ("googlenet", 224, 53.5, 19195, 9.78),
        ("vgg19", 224, 574.7, 42679, 120.6),
    ],
)
def test_volumes_of_a_batch_of_1024(
    name: str, side: int, weights: float, data: float, tera: float | None
) -> None:
    with torch.device("meta"):
        volumes = profile(build_model(name), (3, side, side), 1024)
    assert volumes.weight_bytes / 1e6 == pytest.approx(weights, rel=1e-3)
    assert volumes.data_bytes / 1e6 == pytest.approx(data, rel=1e-3)
    if tera is not None:
        assert volumes.forward_backward_flops / 1e12 == pytest.approx(tera, rel=1e-3)


def test_table_shows_layers_totals_and_volumes() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(profile(build_model("lenet"), (1, 28, 28), 100)))
    text = capture.get()
    assert "batch 100 of 1x28x28" in text
    cells = {}
    for line in text.splitlines():
        row = re.split(r"\s{2,}", line.strip())
        cells[row[0]] = row[1:]
    # ip1: 800 x 500 weights and 500 biases, 0.4 MAC per image.
    assert cells["ip1"] == ["Linear", "100x500", "400,500", "1.60", "0.32", "0.20", "40.00", "0.24"]
    assert cells["pool1"] == ["MaxPool2d", "100x20x12x12", "4.61", "1.15"]
    assert cells["total"] == ["431,080", "1.72", "229.30", "1.38"]
    # D: 784 + 20 x 12 x 12 + 800 + 500 floats per image; 6 x 229.3 M operations.
    assert "|W| 1.72 MB, D 1.99 MB, D / |W| 1.2, 1.4 GFLOP per step" in text
