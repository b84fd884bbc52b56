"""Extra state lies in a buffer of bytes while a network is trained."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.unusual.layers import Clamp, Peculiar
from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.inventory.network_state import EXTRA_STATE_BYTES
from firecaffe.models.extra_state import hold_extra_state, let_go_of_extra_state


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
    let_go_of_extra_state(other)
    assert repr(other.value) == repr(value)
    assert not dict(other.named_buffers())
    assert not other._forward_hooks


def test_a_forward_takes_and_gives() -> None:
    network = nn.Sequential(nn.Linear(2, 2), Clamp())
    hold_extra_state(network)
    buffer = network.get_buffer(f"1.{EXTRA_STATE_BYTES}")
    begun = buffer.clone()
    network(torch.ones(1, 2))
    assert not torch.equal(buffer, begun)
    buffer.copy_(begun)
    network.eval()(torch.ones(1, 2))
    assert network[1].limit == 0.0


def test_a_copy_has_its_own() -> None:
    network = nn.Sequential(Clamp())
    hold_extra_state(network)
    other = copy.deepcopy(network)
    other(torch.ones(1, 2))
    assert [network[0].limit, other[0].limit] == [0.0, 1.0]
    let_go_of_extra_state(other)
    assert other[0].limit == 1.0


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
