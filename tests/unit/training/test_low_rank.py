"""A training of a network with layers of lower rank, from weights that were decomposed."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import firecaffe
from firecaffe import ModelConfig, Recipe, RunConfig, TrainConfig
from firecaffe.data import TensorDataset
from firecaffe.models.low_rank import low_rank_weights

RANKS = {"1": 3}


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.Tanh(), nn.Linear(9, 4))


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(
        torch.randn(count, 1, 6, 6, generator=generator), torch.arange(count) % 4, 4
    )


def test_trained_and_loaded(tmp_path: Path) -> None:
    weights = tmp_path / "low.safetensors"
    save_file(low_rank_weights(network().state_dict(), RANKS), weights)
    recipe = Recipe(
        model=ModelConfig(weights=str(weights), low_rank=RANKS),
        train=TrainConfig(16, 4, steps=3, device="cpu"),
        run=RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    result = firecaffe.train(recipe, network, data(64), data(20))
    assert result.model is not None
    loaded = firecaffe.load(tmp_path / "run", network)
    state = loaded.state_dict()
    assert state["1.reduce.weight"].shape == (3, 36)
    assert all(torch.equal(each, state[name]) for name, each in result.model.state_dict().items())
