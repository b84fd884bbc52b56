"""The profile of a network: counted by hand, and its kernels against torch's own counter."""

import json
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from firecaffe.api.network_profile import render
from firecaffe.models import build_model
from firecaffe.models.kernel import (
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_1X1,
    CONVOLUTION_3X3,
    CONVOLUTION_LARGE,
    DEPTHWISE,
    ELEMENTWISE,
    GROUPED,
    MATRIX,
    NORM,
    Kernel,
)
from firecaffe.models.layer_costs import profile, profile_on
from tests.kit.training_modules import Composed


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


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_data_bytes_are_the_inputs_of_convolutions_and_fully_connected_layers(
    dtype: torch.dtype, size: int
) -> None:
    network = nn.Sequential(
        *(nn.Conv2d(1, 2, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5, bias=False))
    )
    volumes = profile(network.to(dtype), (1, 4, 4), 3)
    assert volumes.data_bytes == size * 3 * (16 + 8)
    assert volumes.weight_bytes == size * (2 * 9 + 8 * 5)


def test_shared_layers_have_a_row_per_call_and_count_once() -> None:
    conv, twin = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1, bias=False)
    twin.weight = conv.weight
    tied = Composed(
        lambda m, x: m.twin(m.relu(m.conv(m.relu(m.conv(x))))), conv=conv, relu=nn.ReLU(), twin=twin
    )
    volumes = profile(tied, (2, 4, 4), 1)
    assert [row.name for row in volumes.layers] == ["conv", "relu", "conv#2", "relu#2", "twin"]
    assert [row.parameters for row in volumes.layers] == [38, 0, 0, 0, 0]
    assert volumes.parameters == 38
    assert volumes.macs == 3 * (2 * 16 * 2 * 9)
    assert volumes.data_bytes == 3 * 4 * (2 * 16)


def test_parameters_outside_of_called_leaves_are_in_the_totals() -> None:
    parts = {"gain": nn.Parameter(torch.ones(3)), "fc": nn.Linear(3, 2), "unused": nn.Linear(5, 7)}
    volumes = profile(Composed(lambda m, x: m.fc(x.flatten(1) * m.gain), **parts), (3, 1, 1), 1)
    assert {row.name: row.parameters for row in volumes.layers} == {"fc": 8, "": 3}
    assert volumes.parameters == 3 + 8 + 42


def test_module_is_left_as_it_was() -> None:
    network = build_model("googlenet_small_bn").eval()
    dropout = network.get_submodule("dropout").train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    rng = torch.get_rng_state()
    first = profile(network, (3, 32, 32), 4)
    assert [part for part in network.modules() if part.training] == [dropout]
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert profile(network, (3, 32, 32), 4) == first
    with pytest.raises(RuntimeError):
        profile(network, (5, 32, 32), 1)
    assert [part for part in network.modules() if part.training] == [dropout]
    assert not any(part._forward_hooks for part in network.modules())


def test_it_takes_no_memory() -> None:
    network = build_model("googlenet_small_bn")

    def check(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert all(tensor.is_meta for tensor in (*inputs, output, *part.parameters()))

    for part in network.modules():
        part.register_forward_hook(check)
    # 53 TB of images, were they there.
    assert profile(network, (3, 32, 32), 2**32).layers[0].macs > 2**50
    assert not any(tensor.is_meta for tensor in network.state_dict().values())


def test_table_and_json_show_layers_totals_and_volumes() -> None:
    volumes = profile(build_model("lenet"), (1, 28, 28), 100)
    plain = json.loads(json.dumps(volumes.as_dict()))
    assert (plain["macs"], plain["input_CHW"]) == (volumes.macs, [1, 28, 28])
    assert plain["layers"][0]["output_shape"] == [100, 20, 24, 24]
    names = [row["name"] for row in plain["layers"]]
    assert names == ["conv1", "pool1", "conv2", "pool2", "flatten", "ip1", "relu1", "ip2"]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(render(volumes))
    text = capture.get()
    assert "batch 100 of 1x28x28" in text
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    cells = {name: row for name, *row in rows}
    # ip1: 800 x 500 weights and 500 biases, 0.4 MAC per image.
    assert cells["ip1"] == ["Linear", "100x500", "400,500", "1.60", "0.32", "0.20", "40.00", "0.24"]
    assert cells["pool1"] == ["MaxPool2d", "100x20x12x12", "4.61", "1.15"]
    assert cells["total"] == ["431,080", "1.72", "229.30", "1.38"]
    # D: 784 + 20 x 12 x 12 + 800 + 500 floats per image; 6 x 229.3 M operations.
    assert "|W| 1.72 MB, D 1.99 MB, D / |W| 1.2, 1.4 GFLOP per step" in text


class Mixed(nn.Module):
    """A recurrent layer, attention as a function, and a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.qkv = nn.Linear(16, 48)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.recurrent(x)
        parts = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        z = functional.scaled_dot_product_attention(*parts)
        out: Tensor = self.layer(y) + z.transpose(1, 2).flatten(2)
        return out


def kernels_by_layer(network: nn.Module, *shape: int) -> dict[str, tuple[Kernel, ...]]:
    volumes = profile_on(network.to("meta"), torch.zeros(2, *shape, device="meta"))
    return {row.name: row.kernels for row in volumes.layers}


def kernels(network: nn.Module, *shape: int) -> list[Kernel]:
    return [kernel for row in kernels_by_layer(network, *shape).values() for kernel in row]


CASES: list[tuple[Any, tuple[int, ...]]] = [
    (Mixed, (12, 8)),
    (lambda: build_model("googlenet_small_bn"), (3, 32, 32)),
    (lambda: build_model("alexnet"), (3, 227, 227)),
]


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_operations_are_those_of_torch_s_counter(build: Any, shape: tuple[int, ...]) -> None:
    network = build().to("meta").train()
    ours = sum(kernel.flops for kernel in kernels(network, *shape))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network(torch.zeros(2, *shape, device="meta"))
    assert 2 * ours == counter.get_total_flops()


def test_classes_of_convolutions() -> None:
    def kind(*args: Any, **words: Any) -> str:
        return kernels(nn.Conv2d(*args, **words), args[0], 16, 16)[0].kind

    assert kind(64, 64, 3) == CONVOLUTION_3X3
    assert kind(64, 64, 1) == CONVOLUTION_1X1
    assert kind(64, 64, 5) == CONVOLUTION_LARGE
    assert kind(64, 64, 3, stride=2) == kind(64, 64, 3, dilation=2) == CONVOLUTION
    assert kind(64, 64, 3, groups=64) == DEPTHWISE
    assert kind(64, 64, 3, groups=4) == GROUPED
    assert kind(64, 64, 3, groups=2) == CONVOLUTION_3X3  # 32 channels a group: as one of its own


def test_sizes_of_a_convolution_and_of_dropout() -> None:
    (conv,) = kernels(nn.Conv2d(8, 24, 3, bias=False), 8, 6, 5)
    assert (conv.flops, conv.weights) == (2 * 24 * 8 * 9 * 4 * 3, 24 * 8 * 9)
    assert conv.moved == 8 * 6 * 5 + 24 * 4 * 3
    assert (conv.side, conv.rows, conv.has_input_gradient) == (24, 4 * 3, False)
    (dropout,) = kernels(nn.Dropout(), 10)
    assert (dropout.kind, dropout.moved) == (ELEMENTWISE, 20)


def test_functions_count_where_they_are_called() -> None:
    """The addition of a residual block belongs to the call before it; a view costs nothing."""
    norm, addition = kernels_by_layer(build_model("resnet18"), 3, 64, 64)["layer1.0.bn2"]
    assert (norm.kind, addition.kind, addition.moved) == (NORM, ELEMENTWISE, 3 * 64 * 16 * 16)
    (flat,) = kernels(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), 3, 4)
    assert flat.kind == MATRIX


def test_a_library_joins_what_a_recurrent_layer_does() -> None:
    mixed = Mixed()
    rows = kernels_by_layer(mixed, 12, 8)
    recurrent = rows["recurrent"]
    assert {kernel.kind for kernel in recurrent} == {MATRIX}
    assert len(recurrent) > 12 / 2  # each step has its own, but reads no weights again
    read = sum(kernel.weights for kernel in recurrent)
    assert read == pytest.approx(sum(p.numel() for p in mixed.recurrent.parameters()), rel=0.01)
    assert {kernel.rows for kernel in recurrent} == {0.0}
    assert ATTENTION in {kernel.kind for kernel in rows["qkv"]}
