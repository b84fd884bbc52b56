"""How the profile counts, on networks small enough to count by hand."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.models import MODELS, build_model
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
    assert conv.parameters == 8 * 3 * 25 + 8
    assert conv.weight_bytes == 4 * conv.parameters
    assert conv.input_activation_bytes == 4 * 2 * 3 * 9 * 9
    assert conv.output_activation_bytes == 4 * 2 * 8 * 3 * 3
    assert conv.macs == 2 * (8 * 3 * 3) * (3 * 25)
    assert conv.forward_backward_flops == 6 * conv.macs
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


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
def test_activations_follow_the_batch_and_weights_do_not(batch_size: int) -> None:
    network = build_model("lenet")
    one, many = profile(network, (1, 28, 28), 1), profile(network, (1, 28, 28), batch_size)
    assert many.data_bytes == batch_size * one.data_bytes
    assert many.macs == batch_size * one.macs
    assert many.weight_bytes == one.weight_bytes


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


def test_rows_are_in_network_order() -> None:
    names = [row.name for row in profile(build_model("lenet"), (1, 28, 28), 1).layers]
    assert names == ["conv1", "pool1", "conv2", "pool2", "flatten", "ip1", "relu1", "ip2"]


def test_as_dict_survives_json() -> None:
    volumes: Profile = profile(build_model("lenet"), (1, 28, 28), 2)
    plain = json.loads(json.dumps(volumes.as_dict()))
    assert plain["macs"] == volumes.macs
    assert plain["input_CHW"] == [1, 28, 28]
    assert plain["layers"][0]["output_shape"] == [2, 20, 24, 24]
    assert len(plain["layers"]) == len(volumes.layers)
