"""The state that a network says it has, and what of it no training keeps."""

import pytest
import torch
from torch import nn

from benchmarks.unusual import layers
from firecaffe.errors import RecipeError
from firecaffe.inventory.network_state import check_state, kinds_of


def test_names_are_sorted_by_what_becomes_of_them() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), layers.Clamp(), layers.Tied())
    network[0].bias.requires_grad_(False)
    kinds = kinds_of(network)
    assert kinds.frozen == ["0.bias"]
    assert kinds.trained[:3] == ["0.weight", "1.weight", "1.bias"]
    assert kinds.averaged == ["1.running_mean", "1.running_var"]
    assert kinds.counted == ["1.num_batches_tracked"]
    assert kinds.extra == ["2"]
    assert kinds.shared == [["3.down.weight", "3.up.weight"]]


def test_a_sparse_buffer_is_refused() -> None:
    network = nn.Linear(2, 2)
    network.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(RecipeError, match="buffer mask is float32, sparse_coo"):
        check_state(network)


def test_parameters_that_only_lie_side_by_side_are_taken() -> None:
    memory = torch.randn(8)
    network = nn.Module()
    network.one, network.other = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    check_state(network)
    network.other = nn.Parameter(memory[3:])
    with pytest.raises(RecipeError, match="one and other share memory"):
        check_state(network)
