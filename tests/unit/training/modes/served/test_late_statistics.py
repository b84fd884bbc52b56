"""Buffers of a network that many learners change at once."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe.data import TensorDataset
from tests.kit.training import recipe_with


class Keeping(nn.Module):
    """Keeps what learners must not add up: a variance, a range from infinity, a place, bytes."""

    low: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=None)
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("place", torch.tensor(0))
        self.mean = 0.0
        self.out = nn.Linear(2, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.low.copy_(torch.minimum(self.low, features.min()))
            self.place.copy_((self.place + len(features)) % 12)
            self.mean += 0.1 * (features.mean().item() - self.mean)
        output: torch.Tensor = self.out(self.norm(features))
        return output

    def get_extra_state(self) -> dict[str, float]:
        return {"mean": self.mean}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]


@pytest.mark.parametrize("mode", ["asynchronous", "stale"])
def test_statistics_of_many_learners_are_some_that_one_could_have(
    mode: str, tmp_path: Path
) -> None:
    features = 1 + torch.rand(256, 2, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(features, features.sum(1, keepdim=True))
    recipe = recipe_with(
        f"synchrony.mode={mode} synchrony.clock=simulated synchrony.learners=16 train.steps=12 "
        "train.global_batch_size=16 train.micro_batch_size=4 task.name=regression "
        f"solver.base_lr=0.01 run.tensorboard=False run.folder={tmp_path / 'run'}"
    )
    result = firecaffe.train(recipe, model=Keeping, train_set=data, test_set=data)
    kept: Any = firecaffe.load(result.folder, model=Keeping)
    variance = features.var(0)
    assert torch.all((kept.norm.running_var > 0) & (kept.norm.running_var < 2 * variance))
    assert features.min() <= kept.low < 1.2
    assert 0 <= kept.place < 12
    assert 0 < kept.mean < 2
    assert math.isfinite(result.test_loss)
