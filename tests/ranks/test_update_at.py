"""Each rank updates a shard of the weights: the bits of one worker, in every way to update."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import CheckpointConfig, ExchangeConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

# 12 micro-batches of 4 over 102 samples: steps 3, 6 and 9 end an epoch with one micro-batch of 4,
# one of 2, and ten that are empty. 2, 3 and 4 workers: with one node of the tree each, or several.
RECIPE = Recipe(
    train=TrainConfig(48, 4, steps=7, seed=5, device="cpu", ema_decay=0.8, eval_every=3),
    solver=SolverConfig(
        base_lr=0.02,
        momentum=0.9,
        weight_decay=1e-3,
        decay_mult={"@vector": 0.0},
        lr_mult={"head.*": 2.0},
    ),
    exchange=ExchangeConfig(bucket_bytes=1500, update_at="shards"),
    checkpoint=CheckpointConfig(every=5),
)

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "caffe": {"type": "nesterov", "momentum_form": "caffe", "momentum_correction": True},
    "decoupled": {"decay_form": "decoupled"},
    "adagrad": {"type": "adagrad"},
    "adadelta": {"type": "adadelta"},
    "rmsprop": {"type": "rmsprop"},
    "adam": {"type": "adam"},
    "adamw": {"type": "adamw", "lr_policy": "poly"},
    "clip": {"type": "adam", "clip_gradients": 0.05},
    "lars": {"type": "lars", "base_lr": 2.0},
    "lamb": {"type": "lamb"},
}


class Net(Everything):
    """With rows of an odd length, one number, a weight that is not one row after the other in
    memory, and one without elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(6, 37, 3)
        self.head = nn.Linear(37, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.linspace(-1, 1, 20).view(4, 5).t())
        self.nothing = nn.Parameter(torch.zeros(3, 0))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean_of_inputs = 0.9 * self.mean_of_inputs + 0.1 * images.mean()
        x = torch.relu(self.norm(self.conv(images)))
        x = self.dropout(torch.relu(self.again(x)).mean((2, 3)))
        logits: Tensor = self.head(x) * self.frozen * self.scale + self.nothing.sum()
        if images.mean() > 0:  # a parameter that some micro-batches use, and some steps
            logits = logits + self.rare
        return logits + self.turned.square().sum(0) * images.mean()


def fit(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    data = small_data(102), small_data(30, 1)
    return firecaffe.train(recipe, Net, *data, resume=resume, validation_set=small_data(20, 2))


def trained(
    ranks: Ranks, workers: int, recipe: Recipe, folder: Path, resume: str | None = None
) -> firecaffe.Result:
    results = ranks.shared(workers, fit, recipe, str(folder), resume)
    told = {(each.state_sha256, each.weights_sha256, each.test_loss, each.loss) for each in results}
    assert len(told) == 1
    result: firecaffe.Result = results[0]
    return result


def at(update_at: Literal["all", "shards"], recipe: Recipe = RECIPE) -> Recipe:
    exchange = dataclasses.replace(recipe.exchange, update_at=update_at)
    return dataclasses.replace(recipe, exchange=exchange)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_bits_of_one_worker(ranks: Ranks, name: str, tmp_path: Path) -> None:
    solver = dataclasses.replace(RECIPE.solver, **SOLVERS[name])
    recipe = dataclasses.replace(RECIPE, solver=solver)
    alone = trained(ranks, 1, at("all", recipe), tmp_path / "all")
    for workers in (1, 2, 3, 4):
        found = trained(ranks, workers, recipe, tmp_path / str(workers))
        assert [row["loss"] for row in found.history] == [row["loss"] for row in alone.history]
        assert not found.identity_doubts
        assert found.weights_sha256 == alone.weights_sha256, workers
        assert found.state_sha256 == alone.state_sha256, workers
        assert (found.test_loss, found.metrics) == (alone.test_loss, alone.metrics)
        assert found.validation == alone.validation


def test_a_layout_goes_on_from_any_other(ranks: Ranks, tmp_path: Path) -> None:
    """After step 5, each time."""
    words: list[tuple[int, Literal["all", "shards"]]] = [
        (3, "shards"),
        (2, "all"),
        (2, "shards"),
        (4, "shards"),
    ]
    for solver in (SolverConfig(type="adam"), SolverConfig(type="lamb", clip_gradients=0.05)):
        recipe = dataclasses.replace(RECIPE, solver=solver)
        alone = trained(ranks, 1, at("all", recipe), before := tmp_path / solver.type)
        for workers, update_at in words:
            checkpoint = str(before / "checkpoints" / "step-00000005")
            before = tmp_path / f"{solver.type} {workers} {update_at}"
            now = at(update_at, recipe)
            found = trained(ranks, workers, now, tmp_path / f"{before} on", checkpoint)
            assert found.state_sha256 == alone.state_sha256, (workers, update_at)
            assert not found.identity_doubts
            trained(ranks, workers, now, before)
