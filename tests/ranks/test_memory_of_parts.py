"""What a worker holds of a model in parts or in stages: the bytes of its tensors, by formula."""

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import ParallelConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.training import build_training
from firecaffe.training.loop import Training, train
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.records import Records
from firecaffe.training.updates.every_rank import EveryRank
from tests.ranks.networks import small_data
from tests.world import Ranks

WIDE, MICRO, LEAVES = 512, 8, 6
FLOAT = 4
RECIPE = Recipe(
    train=TrainConfig(MICRO * LEAVES, MICRO, steps=2, device="cpu"),
    solver=SolverConfig(base_lr=0.1, momentum=0.9),
)


class Net(nn.Module):
    """Fully connected layers, almost all of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, WIDE)
        self.body = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4)))
        self.last = nn.Linear(WIDE, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.body(self.first(x.flatten(1))))
        return y


class Kept:
    """A tensor that autograd keeps for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Activations:
    """The bytes that autograd keeps for backward, without weights, and the most of them at once."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = {each.untyped_storage().data_ptr() for each in weights}
        self.kept = Counter[int]()
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Kept:
        kept, storage = Kept(tensor), tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self.weights:
            self.now += size * (not self.kept[place])
            self.most = max(self.most, self.now)
            self.kept[place] += 1
            weakref.finalize(kept, self.let_go, place, size)
        return kept

    def let_go(self, place: int, size: int) -> None:
        self.kept[place] -= 1
        self.now -= size * (not self.kept[place])


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def fit(parallel: ParallelConfig, folder: str) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state at the end, and the most of activations."""
    found = dict[str, int]()
    recipe = dataclasses.replace(
        RECIPE, parallel=parallel, run=RunConfig(folder=folder, tensorboard=False)
    )

    def run_training(t: Training, records: Records) -> firecaffe.Result:
        activations = Activations(t.steps.stepper.holding.forward.model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(activations.pack, lambda kept: kept.tensor):
            result = train(t, records)
        assert isinstance(t.steps.stepper, EveryStep)
        assert isinstance(t.steps.stepper.update, EveryRank)
        for name in ("parameter", "optimizer"):
            parts = t.state.pieces[name].parts().values()
            found[name] = sum(nbytes(part.tensors) for part in parts)
        found["gradient"] = nbytes(bucket.flat for bucket in t.steps.stepper.update.reducer.buckets)
        found["activation"] = activations.most
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_training, "run_training", run_training)
        firecaffe.train(recipe, Net, small_data(100), small_data(30, 1))
    return found


def linear(inputs: int, outputs: int) -> int:
    return FLOAT * (inputs * outputs + outputs)


BODY = linear(WIDE, WIDE)
FIRST, LAST = linear(36, WIDE), linear(WIDE, 4)


@pytest.mark.parametrize(("pipeline", "held"), [("1f1b", (2, 1)), ("gpipe", (LEAVES, LEAVES))])
def test_a_stage(ranks: Ranks, pipeline: Any, held: tuple[int, int], tmp_path: Path) -> None:
    """Stage k of K holds K - k micro-batches at once, or all; of each the inputs of its layers."""
    words = ParallelConfig(1, stages=["body.2"], pipeline=pipeline)
    found = ranks.shared(2, fit, words, str(tmp_path / "run"))
    weights = FIRST + 2 * BODY, 2 * BODY + LAST
    inputs = FLOAT * MICRO * (36 + 2 * WIDE), FLOAT * MICRO * 3 * WIDE
    for stage, of_stage in enumerate(found):
        assert of_stage["parameter"] == weights[stage]
        assert of_stage["optimizer"] == weights[stage]  # momentum
        assert of_stage["gradient"] == pytest.approx(weights[stage], rel=0.01)
        assert of_stage["activation"] == pytest.approx(held[stage] * inputs[stage], rel=0.05)


def test_a_split(ranks: Ranks, tmp_path: Path) -> None:
    words = ParallelConfig(1, 2, {"body.*": "neurons"})
    weights = FIRST + 4 * BODY / 2 + LAST
    for of_rank in ranks.shared(2, fit, words, str(tmp_path / "run")):
        assert of_rank["parameter"] == of_rank["optimizer"] == weights
        assert of_rank["gradient"] == pytest.approx(weights, rel=0.01)
