"""Code of a user's that seeds the process's generators and draws from them reaches no bit."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, RunConfig, SolverConfig, Task, TrainConfig
from firecaffe.cluster.world import World
from firecaffe.data.train_batches import TrainBatches
from firecaffe.training.plugins import VARIABLE, Plugin
from tests.world import Ranks

COUNT = 48


def disturb(key: int) -> float:
    """Seeds each of the three generators, and draws from each."""
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Seeding:
    """An own data set whose batches are a function of their samples, by way of the generators."""

    def __init__(self, is_random: bool = False) -> None:
        self.is_random = is_random

    def __len__(self) -> int:
        return COUNT

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_random:  # as it comes: a function of the batch's key
            drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
            return torch.rand(len(indices_B), 6) + drawn, indices_B % 3
        return torch.tensor([[disturb(int(each))] * 6 for each in indices_B]), indices_B % 3


class Depth(nn.Module):
    """Dropout, and layers that are left out by python's generator and by numpy's, in evaluation
    too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 3)
        # Initial weights by the two others.
        nn.init.constant_(self.last.bias, random.random() + float(np.random.rand()))

    def forward(self, inputs_BF: Tensor) -> Any:
        for each in self.layers:
            if random.random() < 0.7:
                inputs_BF = inputs_BF + each(nn.functional.dropout(inputs_BF, 0.3))
            if np.random.rand() < 0.5:
                inputs_BF = inputs_BF * 1.25
        return self.last(inputs_BF)


class Beside(Plugin):
    """Disturbs before and after each batch."""

    def around_batches(self, batches: TrainBatches, world: World) -> Any:
        def train_batch(step: int, leaf: int) -> Any:
            disturb(3)
            batch = batches.train_batch(step, leaf)
            disturb(4)
            return batch

        return SimpleNamespace(order=batches.order, train_batch=train_batch)


def drawn_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum over some of the samples. The generators are not left as they were."""
    total = (outputs[:, 0] * (torch.rand(len(outputs)) < 0.8)).sum() + np.random.rand()
    disturb(len(targets))
    return total


def fit(folder: str, is_random: bool = False, is_disturbed: bool = True) -> Any:
    recipe = Recipe(
        train=TrainConfig(12, 2, steps=6, eval_every=2, eval_batch_size=5),
        solver=SolverConfig(base_lr=0.05),
        run=RunConfig(folder, tensorboard=False),
    )
    task = Task(
        nn.functional.cross_entropy,
        {"drawn": firecaffe.Sums(drawn_sum, lambda sums: float(sums) + random.random(), True)},
    )
    with pytest.MonkeyPatch.context() as patch:
        if is_disturbed:
            patch.setitem(sys.modules, "beside", SimpleNamespace(plugin=Beside))
            patch.setenv(VARIABLE, "beside")
        data = Seeding(is_random)
        given = data if is_disturbed else held(data)
        disturb(5)
        before = random.random(), float(np.random.rand()), float(torch.rand(()))
        disturb(5)
        result = firecaffe.train(recipe, Depth, given, given, task=task, validation_set=given)
        after = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert before == after
    return result.state_sha256, result.metrics, result.identity_doubts


def held(data: Seeding) -> firecaffe.TensorDataset:
    """The same samples, in memory."""
    return firecaffe.TensorDataset(*data.batch(torch.arange(COUNT)))


def test_what_draws_and_seeds_beside_a_training_changes_no_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    undisturbed = ranks.shared(1, fit, str(tmp_path / "0"), False, False)[0]
    for name, world_size in (("a", 1), ("b", 1), ("c", 2)):
        for found in ranks.shared(world_size, fit, str(tmp_path / name)):
            assert found == undisturbed
    assert not undisturbed[2]


def test_an_own_data_set_may_draw_what_its_batches_are(ranks: Ranks, tmp_path: Path) -> None:
    """By a key, on any number of workers, without a word about it."""
    alone = ranks.shared(1, fit, str(tmp_path / "1"), True)[0]
    for found in ranks.shared(2, fit, str(tmp_path / "2"), True):
        assert found == alone
    assert not alone[2]
