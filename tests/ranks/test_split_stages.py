"""Models in parts where what a rank has, or has not, could decide: the bits of one worker.

Compositions with other words are in the matrix (`test_matrix.py`).
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import firecaffe
from firecaffe import (
    ExchangeConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    ShareConfig,
    SolverConfig,
    TrainConfig,
)
from tests.ranks.networks import small_data
from tests.world import Ranks

BY_ROWS, BY_NEURONS = {"0": "rows"}, {"3": "neurons", "5": "inputs"}

CASES: dict[str, tuple[ParallelConfig, dict[str, Any]]] = {
    # A pool of an image's edge has fewer numbers in its mean: of parts that is another rounding.
    "a stage begins at a pool of rows": (ParallelConfig(0, 2, BY_ROWS, 2, stages=["1"]), {}),
    "values are not trained, and some ranks have none": (
        ParallelConfig(0, 2, BY_NEURONS, 2),
        {
            "share": ShareConfig({"3": 2}, train=False),
            "exchange": ExchangeConfig(update_at="shards", bucket_bytes=1500),
        },
    ),
}


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
        *(nn.Flatten(), nn.Linear(180, 21), nn.GELU(), nn.Linear(21, 4)),
    )


def fit(recipe: Recipe, folder: Path) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=str(folder), tensorboard=False))
    return firecaffe.train(recipe, net, small_data(70), small_data(30, 1))


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_one_worker(ranks: Ranks, name: str, tmp_path: Path) -> None:
    layout, words = CASES[name]
    recipe = Recipe(
        train=TrainConfig(32, 4, steps=4, seed=5, device="cpu"),
        solver=SolverConfig(base_lr=0.02, momentum=0.9),
        parallel=layout,
        **words,
    )
    alone = dataclasses.replace(recipe, parallel=layout.over(1, 1))
    [expected] = ranks.shared(1, fit, alone, tmp_path / "alone")
    for found in ranks.shared(4, fit, recipe, tmp_path / "four"):
        assert found.weights_sha256 == expected.weights_sha256
        assert found.state_sha256 == expected.state_sha256
        assert found.test_loss == expected.test_loss
