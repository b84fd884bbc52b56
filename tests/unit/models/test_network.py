"""The network that a recipe names: how it is made, what is frozen, and extra state."""

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.training.unusual.layers import Clamp, Peculiar
from firecaffe.errors import CheckpointError, OwnCodeError, RecipeError
from firecaffe.inventory.network_state import EXTRA_STATE_BYTES
from firecaffe.models import ModelConfig
from firecaffe.models.extra_state import hold_extra_state, release_extra_state
from firecaffe.models.network import freeze, make_network, maker_of, with_outline
from tests.kit.models_refused import refused
from tests.kit.training_fixtures import Patch
from tests.unit.models.own_nets import PLACE, Net, Reads


def made(member: str, **words: Any) -> nn.Module:
    return make_network(ModelConfig(f"{PLACE}:{member}", **words), 7, 3)


def test_a_function_is_called_with_its_arguments_and_what_the_data_say() -> None:
    network = made("Net", args={"width": 6})
    assert isinstance(network, Net)
    assert network.stem.weight.shape == (6, 3, 3, 3)
    assert network.head.weight.shape == (7, 6)
    other = made("Net", args={"num_classes": 2, "in_channels": 1})
    assert isinstance(other, Net)
    assert (other.head.out_features, other.stem.in_channels) == (2, 1)
    assert isinstance(made("Reads"), Reads)  # which takes no in_channels


def test_a_row_of_the_table_takes_arguments_too() -> None:
    lenet = make_network(ModelConfig("lenet", args={"num_classes": 3}), 10, 1)
    assert lenet(torch.zeros(1, 1, 28, 28)).shape == (1, 3)


MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Net", {"args": {"breadth": 3}}, ["breadth=3", "num_classes: int"]),
    ("number", {}, ["returned 3", "torch.nn.Module"]),
    ("lazy", {}, ["Lazy", "weight"]),
    ("Nett", {}, ["no 'Nett'", "Net"]),
    ("Net", {"freeze": ["*.wieght"]}, ["model.freeze", "'*.wieght'", "stem.weight"]),
    ("Net", {"freeze": ["*"]}, ["model.freeze", "none of the network's 6"]),
]


@pytest.mark.parametrize(("member", "words", "parts"), MISTAKES)
def test_what_is_wrong_is_one_line(member: str, words: dict[str, Any], parts: list[str]) -> None:
    with refused(RecipeError, ["model.", *parts]):
        made(member, **words)


def test_what_a_users_code_raises_is_theirs_to_read() -> None:
    with pytest.raises(OwnCodeError, match="KeyError") as caught:
        made("fails")
    assert 'raise KeyError("no such layer")' in caught.value.traceback


def test_a_network_that_was_given_in_python_cannot_be_made_again() -> None:
    with refused(RecipeError, ["'own Net'", "path/file.py:function"]):
        maker_of("own Net")


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_there_is_named(library: str, monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with refused(RecipeError, [f"pip install {library}"]):
        make_network(ModelConfig(f"{library}:resnet18"), 10, 3)


def test_a_library_of_another_torch_is_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    """As torchvision is that was built for another torch, and timm, which imports it."""
    (tmp_path / "timm.py").write_text('raise RuntimeError("operator nms does not\\nexist")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with refused(RecipeError, ["nms does not exist", torch.__version__]):
        make_network(ModelConfig("timm:resnet18"), 10, 3)


@pytest.mark.parametrize(("member", "device"), [("Net", "meta"), ("Reads", "cpu")])
def test_the_outline_takes_no_memory_unless_the_code_reads_numbers(
    member: str, device: str
) -> None:
    config = ModelConfig(f"{PLACE}:{member}")
    assert with_outline(config, 3, 1, device_of_a_forward) == device


def test_what_fails_in_memory_too_is_raised() -> None:
    with pytest.raises(OwnCodeError):
        with_outline(ModelConfig(f"{PLACE}:Broken"), 3, 1, device_of_a_forward)


def device_of_a_forward(network: nn.Module) -> str:
    device = next(network.parameters()).device
    try:
        network.eval()(torch.zeros(2, 1, 5, 5, device=device))
    except Exception as error:
        raise OwnCodeError("forward") from error
    return str(device)


@pytest.mark.parametrize(
    ("patterns", "trained", "changes"),
    [
        (["stem.*", "*.bias"], ["norm.weight", "head.weight"], True),
        (["norm.*", "head.*"], ["stem.weight", "stem.bias"], False),
    ],
)
def test_normalization_that_is_frozen_whole_keeps_its_statistics(
    patterns: list[str], trained: list[str], changes: bool
) -> None:
    network = Net(3).train()
    freeze(network, patterns)
    assert [name for name, each in network.named_parameters() if each.requires_grad] == trained
    network(torch.ones(2, 1, 5, 5))
    assert bool(network.norm.num_batches_tracked) == changes
    assert network.drop.training


class Holder(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state

    def forward(self, values: Tensor) -> Tensor:
        return values


VALUES: list[Any] = [
    None,
    {"numbers": [1, 2.5, -3, True], "word": "ä", "bytes": b"\0\1"},
    (1, ("deep", [()])),
    {1: torch.arange(6, dtype=torch.int16).reshape(2, 3).T, "empty": torch.zeros(0, 2)},
    np.arange(3.0),
    torch.tensor([1.5], dtype=torch.bfloat16),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    one, other = Holder(value), Holder(None)
    for network in (one, other):
        hold_extra_state(network)
    other.get_buffer(EXTRA_STATE_BYTES).copy_(one.get_buffer(EXTRA_STATE_BYTES))
    release_extra_state(other)
    assert repr(other.value) == repr(value)
    assert not dict(other.named_buffers())
    assert not other._forward_hooks


def test_a_forward_takes_and_gives_and_a_copy_has_its_own() -> None:
    network = nn.Sequential(Clamp())
    hold_extra_state(network)
    other = copy.deepcopy(network)
    buffer = other.get_buffer(f"0.{EXTRA_STATE_BYTES}")
    begun = buffer.clone()
    other(torch.ones(1, 2))
    assert not torch.equal(buffer, begun)
    assert [network[0].limit, other[0].limit] == [0.0, 1.0]
    buffer.copy_(begun)
    other.eval()(torch.ones(1, 2))
    assert other[0].limit == 0.0


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(RecipeError, match="module 0 cannot be kept"):
        hold_extra_state(nn.Sequential(Peculiar()))
    with torch.device("meta"):
        outline = nn.Sequential(nn.Linear(2, 2), Clamp())
    with pytest.raises(RecipeError, match=r"module 1 .*\[parallel\]"):
        hold_extra_state(outline)
    growing = Holder([])
    hold_extra_state(growing)
    growing.value = [0] * 10_000
    with pytest.raises(RecipeError, match="grows"):
        growing(torch.ones(1))


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x02\0\0\0\xd4\x02"])
def test_damaged_bytes_are_refused(content: bytes) -> None:
    network = Holder(None)
    hold_extra_state(network)
    buffer = network.get_buffer(EXTRA_STATE_BYTES)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="damaged"):
        network(torch.ones(1))
