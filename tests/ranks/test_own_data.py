"""A user's own torch Dataset with random transforms: the same bits on any number of workers."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import firecaffe
from firecaffe import DataConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

RECIPE = Recipe(
    data=DataConfig(hold_out=0.1, balance="classes"),
    train=TrainConfig(24, 4, steps=7, seed=3, eval_every=3, eval_batch_size=7),
    solver=SolverConfig(type="adam", base_lr=0.01),
)


class Photos(Dataset[tuple[Tensor, int]]):
    """Images under transforms as torchvision has them: a random crop by python's generator, a flip
    by torch's, another brightness by numpy's.
    """

    classes = ("a", "b", "c", "d")

    def __init__(self, count: int, seed: int, is_training: bool) -> None:
        self.images, labels = small_data(count, seed).batch(torch.arange(count))
        self.targets = labels.tolist()
        self.is_training = is_training

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.is_training:
            top, left = random.randint(0, 2), random.randint(0, 2)
            image = torch.nn.functional.pad(image, (1, 1, 1, 1))[:, top : top + 6, left : left + 6]
            image = image.flip(2) if torch.rand(()) < 0.5 else image
            image = image * np.random.uniform(0.8, 1.2)
        return image, self.targets[index]


def fit(folder: str, data_workers: int) -> Any:
    recipe = dataclasses.replace(RECIPE, run=RunConfig(folder, tensorboard=False))
    train_set = firecaffe.from_torch(Photos(100, 0, is_training=True), workers=data_workers)
    return firecaffe.train(recipe, Everything, train_set, Photos(30, 1, is_training=False))


@pytest.mark.parametrize("data_workers", [0, 2])
def test_any_number_of_ranks_and_of_data_workers(
    ranks: Ranks, data_workers: int, tmp_path: Path, alone: list[Any]
) -> None:
    # Each rank starts its data workers, and each of these takes 3 s of a processor.
    for world_size in (2,) if data_workers else (2, 3):
        folder = str(tmp_path / f"{world_size}")
        results = ranks.shared(world_size, fit, folder, data_workers)
        for result in results:
            assert result.state_sha256 == alone[0].state_sha256
            assert (result.metrics, result.validation) == (alone[0].metrics, alone[0].validation)
            assert result.identity_doubts == []


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one rank without data workers comes to."""
    return ranks.shared(1, fit, str(tmp_path_factory.mktemp("alone") / "run"), 0)
