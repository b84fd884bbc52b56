"""The kernels of a network: their operations against torch's own counter, classes, traffic."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

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
from firecaffe.models.layer_costs import Profile, profile_on


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


def profiled(network: nn.Module, *shape: int) -> Profile:
    return profile_on(network.to("meta"), torch.zeros(2, *shape, device="meta"))


def kernels(network: nn.Module, *shape: int) -> list[Kernel]:
    return [kernel for row in profiled(network, *shape).layers for kernel in row.kernels]


CASES: list[tuple[Any, tuple[int, ...]]] = [
    (Mixed, (12, 8)),
    (lambda: build_model("resnet50"), (3, 224, 224)),
    (lambda: build_model("googlenet"), (3, 224, 224)),
    (lambda: build_model("alexnet"), (3, 227, 227)),
]


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_operations_are_those_of_torch_s_counter(build: Any, shape: tuple[int, ...]) -> None:
    network = build().to("meta").train()
    found = sum(kernel.flops for kernel in kernels(network, *shape))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network(torch.zeros(2, *shape, device="meta"))
    assert 2 * found == counter.get_total_flops()


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


def test_a_convolution_s_sizes() -> None:
    (found,) = kernels(nn.Conv2d(8, 24, 3, bias=False), 8, 6, 5)
    assert found.flops == 2 * 24 * 8 * 9 * 4 * 3
    assert found.moved == 8 * 6 * 5 + 24 * 4 * 3
    assert found.weights == 24 * 8 * 9
    assert (found.side, found.rows) == (24, 4 * 3)
    assert not found.has_input_gradient


def test_functions_count_where_they_are_called() -> None:
    """The addition of a residual block belongs to the call before it; a view costs nothing."""
    rows = {row.name: row.kernels for row in profiled(build_model("resnet18"), 3, 64, 64).layers}
    kinds = [kernel.kind for kernel in rows["layer1.0.bn2"]]
    assert kinds == [NORM, ELEMENTWISE]
    assert rows["layer1.0.bn2"][1].moved == 3 * 64 * 16 * 16
    flat = kernels(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), 3, 4)
    assert [kernel.kind for kernel in flat] == [MATRIX]


def test_a_library_joins_what_a_recurrent_layer_does() -> None:
    found = {row.name: row.kernels for row in profiled(Mixed(), 12, 8).layers}
    recurrent = found["recurrent"]
    assert {kernel.kind for kernel in recurrent} == {MATRIX}
    assert len(recurrent) > 12 / 2  # each step has its own, but reads no weights again
    read = sum(kernel.weights for kernel in recurrent)
    assert read == pytest.approx(sum(p.numel() for p in Mixed().recurrent.parameters()), rel=0.01)
    assert {kernel.rows for kernel in recurrent} == {0.0}
    assert ATTENTION in {kernel.kind for kernel in found["qkv"]}


def test_dropout_is_one_kernel() -> None:
    (found,) = kernels(nn.Dropout(), 10)
    assert (found.kind, found.moved) == (ELEMENTWISE, 20)
