"""Photos, and a user's own torch Dataset with random transforms: the same bits on any number of
workers; and no code of a user's that seeds the process's generators and draws from them reaches a
bit.
"""

import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import firecaffe
from benchmarks.kit.small_run import pack_photos
from firecaffe import DataConfig, Recipe, Result, SolverConfig, Task, TrainConfig
from firecaffe.cluster.world import World
from firecaffe.data.batches import TrainBatches
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.plugins import VARIABLE, Plugin
from tests.kit.training import recipe_with
from tests.kit.worlds import NAMED, Trained, Training, changed, end

COUNT = 48
OF_SEEDS = Recipe(
    train=TrainConfig(12, 2, steps=6, eval_every=2, eval_batch_size=5),
    solver=SolverConfig(base_lr=0.05),
)


def drawn() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


def disturb(key: int) -> float:
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)
    return drawn()


class Seeding:
    """An own data set whose batches are a function of their samples, by way of the generators."""

    def __init__(self, is_random: bool = False) -> None:
        self.is_random = is_random

    def __len__(self) -> int:
        return COUNT

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_random:  # as it comes: a function of the batch's key
            return torch.rand(len(indices_B), 6) + drawn(), indices_B % 3
        return torch.tensor([[disturb(int(each))] * 6 for each in indices_B]), indices_B % 3


class Drawing(Dataset[tuple[Tensor, int]]):
    """A torch data set whose training samples are random, by each of the generators."""

    classes = ("a", "b", "c")

    def __init__(self, is_training: bool) -> None:
        self.targets = [index % 3 for index in range(COUNT)]
        self.is_training = is_training

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(6) + drawn() if self.is_training else torch.zeros(6)
        return noise + self.targets[index], self.targets[index]


@dataclass(frozen=True)
class OfDrawing(Training):
    """Trains on samples of a class, made by data workers."""

    kind: type[Drawing] = Drawing
    data_workers: int = 0

    def parts(self) -> dict[str, Any]:
        data = firecaffe.from_torch(self.kind(is_training=True), workers=self.data_workers)
        return {"model": Depth, "train_set": data, "test_set": Drawing(is_training=False)}


# Each rank starts its data workers, and each of these takes 3 s of a processor.
@pytest.mark.parametrize(("workers", "data_workers"), [(3, 0), (2, 1)])
def test_any_number_of_ranks_and_of_data_workers(
    trained: Trained, workers: int, data_workers: int
) -> None:
    recipe = changed(OF_SEEDS, data=DataConfig(hold_out=0.1, balance="classes"))
    found = trained(workers, recipe, OfDrawing(data_workers=data_workers))
    assert end(found) == end(trained(1, recipe, OfDrawing()))
    assert found.identity_doubts == []


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


@dataclass(frozen=True)
class OfSeeds(Training):
    is_random: bool = False
    is_disturbed: bool = True

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        recipe = changed(recipe, run={"folder": str(folder), "tensorboard": False})
        task = Task(
            nn.functional.cross_entropy,
            {"drawn": firecaffe.Sums(drawn_sum, lambda sums: float(sums) + random.random(), True)},
        )
        with pytest.MonkeyPatch.context() as patch:
            if self.is_disturbed:
                patch.setitem(sys.modules, "beside", SimpleNamespace(plugin=Beside))
                patch.setenv(VARIABLE, "beside")
            given: Any = Seeding(self.is_random)
            if not self.is_disturbed:  # the same samples, in memory
                given = firecaffe.TensorDataset(*given.batch(torch.arange(COUNT)))
            disturb(5)
            before = drawn()
            disturb(5)
            result = firecaffe.train(recipe, Depth, given, given, task=task, validation_set=given)
        assert drawn() == before
        return result


@pytest.mark.parametrize("workers", [1, 2])
def test_what_draws_and_seeds_beside_a_training_changes_no_bit(
    trained: Trained, workers: int
) -> None:
    undisturbed = trained(1, OF_SEEDS, OfSeeds(is_disturbed=False))
    assert end(trained(workers, OF_SEEDS, OfSeeds())) == end(undisturbed)
    assert not undisturbed.identity_doubts


def test_an_own_data_set_may_draw_what_its_batches_are(trained: Trained) -> None:
    """By a key, on any number of workers, without a word about it."""
    alone, two = (trained(workers, OF_SEEDS, OfSeeds(is_random=True)) for workers in (1, 2))
    assert end(two) == end(alone)
    assert not alone.identity_doubts


def sharded() -> Any:
    share = COUNT // int(os.environ.get("WORLD_SIZE", "1"))
    pair = torch.ones(share, 6), torch.arange(share) % 3
    return pair, pair, pair


class Shard(Drawing):
    def __len__(self) -> int:
        return COUNT // dist.get_world_size()


class NamedData(Training):
    def parts(self) -> dict[str, Any]:
        return {"model": Depth}


BY_NAME = changed(OF_SEEDS, data={"name": f"{__name__}:sharded"})
NEVER_EVALUATED = changed(OF_SEEDS, train={"eval_every": 0})


@pytest.mark.parametrize(
    ("recipe", "training", "asked"),
    [
        (NEVER_EVALUATED, OfDrawing(kind=Shard), "get_world_size"),
        (BY_NAME, NamedData(), "WORLD_SIZE"),
    ],
    ids=["given", "named"],
)
def test_data_that_ask_for_the_number_of_ranks_are_doubted(
    trained: Trained, recipe: Recipe, training: Training, asked: str
) -> None:
    doubts = trained(2, recipe, training).identity_doubts
    assert any("data set" in doubt and asked in doubt for doubt in doubts)


class Counted(Drawing):
    """A curriculum by the samples that it has given."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return super().__getitem__(index)


def test_a_data_set_that_counts_is_doubted(trained: Trained) -> None:
    """Each worker counts what it asks for, and a resume begins anew."""
    (doubt,) = trained(2, NEVER_EVALUATED, OfDrawing(kind=Counted)).identity_doubts
    assert "training set" in doubt
    assert "calls" in doubt


OF_PHOTOS = recipe_with("""
model.name=lenet data.name=packed data.resize=32 data.crop=28 data.mirror=True
train.global_batch_size=24 train.micro_batch_size=4 train.steps=3 train.seed=3
train.eval_batch_size=16 solver.type=nesterov solver.base_lr=0.01 exchange.algorithm=tree
""")


def recipe_on(folder: Path, **words: Any) -> Recipe:
    return changed(OF_PHOTOS, data={"path": str(folder), **words})


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 + 10: three steps are more than an epoch, whose last step is whole."""
    return pack_photos(tmp_path_factory.mktemp("photos"), 48, 10)


@pytest.mark.parametrize(
    "words",
    [{"augment": "inception", "order": "shards"}, {"augment": "caffe"}],
    ids=["inception", "caffe"],
)
def test_workers_a_cache_and_threads_change_no_bit(
    trained: Trained, packed: Path, words: dict[str, str], tmp_path: Path
) -> None:
    alone = trained(1, recipe_on(packed, **words), NAMED)
    cache = {"cache": str(tmp_path / "cache"), "cache_bytes": 80_000, "decode_threads": 3}
    three = trained(3, recipe_on(packed, **words, **cache), NAMED)
    assert end(three) == end(alone)
    assert len(three.data_wait_by_rank) == 3
    assert list((tmp_path / "cache").glob("*.shard"))


def test_a_run_that_skips_says_what_it_left_out(trained: Trained, tmp_path: Path) -> None:
    pack_photos(tmp_path, 48, 10)
    photos = tmp_path / "photos"
    broken = [sorted(photos.glob("train/3/*.jpg"))[0], sorted(photos.glob("test/5/*.jpg"))[0]]
    for path in broken:
        path.write_bytes(path.read_bytes()[:300])
    recipe = recipe_on(photos, name="folder", on_error="skip")
    alone, two = (trained(size, recipe, NAMED) for size in (1, 2))
    assert two.state_sha256 == alone.state_sha256
    lines = read_run_file(two.folder, "result.json")["broken_images"]
    assert {line.split(": not a whole image")[0] for line in lines} == set(map(str, broken))
