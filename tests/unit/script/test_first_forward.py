"""A script is told of state that each rank has of its own, once, at the first forward."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.unusual.layers import PIXELS, WIDTH, Clamp, Words
from benchmarks.unusual.teachers import Teacher
from firecaffe.script.first_forward import tell_of_own_state

IMAGES, VALUES = torch.randn(2, 1, 8, 8), torch.randn(2, WIDTH)
assert IMAGES[0].numel() == PIXELS


def told(network: nn.Module, inputs: torch.Tensor, averages: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_of_own_state(network, "parallelize", averages)
        network.eval()(inputs)
        network.train()(inputs)
        network(inputs)
    return [str(each.message) for each in caught]


def test_weights_that_forward_changes() -> None:
    [line] = told(Words(max_norm=0.1), IMAGES, averages=False)
    assert "parallelize" in line
    assert "table.weight" in line


def test_averages_take_trained_weights_and_no_others() -> None:
    assert not told(Words(max_norm=0.1), IMAGES, averages=True)
    [line] = told(Teacher(), VALUES, averages=True)
    assert "teacher.weight, teacher.bias" in line


def test_extra_state_is_told_before() -> None:
    [line] = told(nn.Sequential(Clamp()), VALUES, averages=True)
    assert "extra state of 0" in line


def test_a_plain_network_is_left_as_it_was() -> None:
    network = nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2))
    assert not told(network, VALUES, averages=False)
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


def test_a_copy_looks_for_itself() -> None:
    network = Words(max_norm=0.1)
    tell_of_own_state(network, "parallelize", averages=False)
    with pytest.warns(UserWarning, match=r"table\.weight"):
        copy.deepcopy(network)(IMAGES)
    assert network._forward_hooks


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not told(Words(max_norm=0.1), IMAGES, averages=False)
    monkeypatch.undo()
