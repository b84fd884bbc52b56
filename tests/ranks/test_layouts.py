"""One model over rows and columns of ranks: any layout comes to the bits of one worker."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.data import TensorDataset
from firecaffe.models.googlenet import Inception
from firecaffe.models.weights import load_weights
from firecaffe.runs.rank_times import explain
from firecaffe.training.first_weights import find_weights
from tests.kit.worlds import Trained, Training, changed, end
from tests.ranks.networks import small_data
from tests.world import Ranks

# 8 micro-batches of 4 over 68 samples: steps 3 and 6 end an epoch with one micro-batch.
RECIPE = Recipe(
    train=TrainConfig(32, 4, steps=4, seed=5, device="cpu", ema_decay=0.8, eval_batch_size=7),
    solver=SolverConfig(base_lr=0.02, momentum=0.9, weight_decay=1e-3, decay_mult={"@vector": 0.0}),
    checkpoint=CheckpointConfig(every=2),
)
HEAD = {"classifier.*": "neurons", "classifier.3": "inputs"}
ALL = {"features.?": "filters", "features.4": "channels", **HEAD}
PATHS = {"features.6": "paths", **HEAD}
ROWS = {"features.[01]": "rows", "features.4": "filters", **HEAD}

LAYOUTS = {
    "data 2": ParallelConfig(split=HEAD, parts=4),
    "model 2": ParallelConfig(1, 2, HEAD, 4),
    "model 4": ParallelConfig(1, 4, HEAD, 4),
    "2 x 2": ParallelConfig(2, 2, HEAD, 4),
    "trick 1": ParallelConfig(1, 1, HEAD, 4, "one_weird_trick"),
    "trick 2": ParallelConfig(1, 2, HEAD, 4, "one_weird_trick"),
    "trick 2 x 2": ParallelConfig(2, 2, HEAD, 4, "one_weird_trick"),
}
WORKERS = {"data 2": 2, "model 2": 2, "trick 1": 1, "trick 2": 2}
"""Of the layouts that are not for 4."""


class Net(nn.Module):
    """Convolutions and paths with BatchNorm, and fully connected layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
            *(nn.MaxPool2d(2), nn.Conv2d(6, 8, 1), nn.ReLU()),
            Inception(8, (2, 3, 2, 3, 1, 2), batch_norm=True),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(63, 21), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(21, 14), nn.ReLU(inplace=True), nn.Linear(14, 4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.features(x).flatten(1))
        return y


NET = Training(Net, 68)


def recipe_of(parallel: ParallelConfig) -> Recipe:
    exchange = ExchangeConfig(shared_memory=parallel.data != 2)  # 2 x 2: as if between hosts
    return changed(RECIPE, parallel=parallel, exchange=exchange)


ALONE = recipe_of(ParallelConfig(split=HEAD, parts=4))


@pytest.mark.parametrize("name", ["data 2", "trick 2 x 2"])
def test_any_layout(trained: Trained, name: str) -> None:
    """Others of whole layers in parts are in the matrix (`test_matrix.py`)."""
    found = trained(WORKERS.get(name, 4), recipe_of(LAYOUTS[name]), NET)
    assert end(found) == end(trained(1, ALONE, NET))
    for rank in explain(found.folder).ranks:
        assert (rank.waits_s["activations"] > 0) == (LAYOUTS[name].model > 1)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        pytest.param(ALL, "model 4", id="layers"),
        pytest.param(PATHS, "model 4", id="paths"),
        pytest.param(ROWS, "2 x 2", id="rows"),
        pytest.param(ALL, "2 x 2", id="layers-2 x 2", marks=pytest.mark.slow),
        pytest.param(PATHS, "2 x 2", id="paths-2 x 2", marks=pytest.mark.slow),
        pytest.param(ROWS, "model 4", id="rows-model 4", marks=pytest.mark.slow),
    ],
)
def test_convolutions_and_paths_in_parts(
    trained: Trained, name: str, words: dict[str, str]
) -> None:
    parallel = dataclasses.replace(LAYOUTS[name], split=words)
    alone = trained(1, recipe_of(parallel.over(1, 1)), NET)
    assert end(trained(4, recipe_of(parallel), NET)) == end(alone)


def test_a_split_run_is_read_as_any_other(trained: Trained) -> None:
    """Its checkpoint has whole tensors by the network's own names."""
    folder = trained(4, recipe_of(LAYOUTS["trick 2 x 2"]), NET).folder
    network = firecaffe.load(folder, Net)
    assert sum(each.numel() for each in network.parameters()) == sum(
        each.numel() for each in Net().parameters()
    )
    averages = load_file(folder / "checkpoints/step-00000004/ema.safetensors")
    for name, each in network.named_parameters():
        assert each.equal(averages[name]), name
    taken = load_weights(Net(), find_weights(str(folder))[0])
    assert (taken.taken, taken.missing, taken.unexpected) == (len(Net().state_dict()), [], [])


class Frozen(Net):
    """Tokens that do not lie one behind the other in memory, and a head that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 4))
        self.classifier.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.features(x).flatten(2).transpose(1, 2))
        return y.mean(1)


class Twice(Frozen):
    """A head that is trained and called several times, and an output that no loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)
        self.aside = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Any:
        tokens = self.features(x).flatten(2).transpose(1, 2)
        logits = self.classifier(tokens).mean(1) + self.classifier(tokens.square()).mean(1)
        return logits, self.aside(tokens)


def loss_of(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs[0], labels)


@pytest.mark.parametrize("make", [Frozen, Twice])
def test_tokens_in_bfloat16_and_parts_that_are_frozen(
    trained: Trained, make: type[nn.Module]
) -> None:
    words = ParallelConfig(1, 1, {"classifier.*": "neurons"}, 4)
    if make is Twice:
        words = dataclasses.replace(words, split={"aside": "neurons", **words.split})
    recipe, training = (
        changed(RECIPE, train={"autocast": "bfloat16"}),
        Training(make, 68, 0, loss_of),
    )
    alone = trained(1, changed(recipe, parallel=words), training)
    for scheme in ("none", "one_weird_trick"):
        layout = dataclasses.replace(words.over(1, 2), scheme=scheme)
        assert end(trained(2, changed(recipe, parallel=layout), training)) == end(alone), scheme


def test_a_number_that_is_not_finite_in_one_part_ends_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """All tell what one worker does, by the whole network's names."""
    model = ModelConfig(freeze=["features.*"])
    recipe = changed(RECIPE, solver={"base_lr": 1e30}, model=model)
    alone = changed(recipe, parallel=LAYOUTS["trick 1"])
    [expected] = ranks.shared(1, NET.error, alone, tmp_path / "alone")
    assert "is not finite is that of classifier.0.weight;" in expected
    for name in ("model 4", "trick 2 x 2"):
        parts = changed(recipe, parallel=LAYOUTS[name])
        assert ranks.shared(4, NET.error, parts, tmp_path / name) == [expected] * 4


class Asked(TensorDataset):
    """Remembers the samples that this rank was asked for."""

    def batch(self, indices: Any) -> Any:
        first, last = int(indices[0]), int(indices[-1])
        if last - first == len(indices) - 1 > 0:  # others are looked at before
            self.asked = [*getattr(self, "asked", []), *indices.tolist()]
        return super().batch(indices)


def evaluated(parallel: ParallelConfig, folder: Path) -> tuple[list[int], float]:
    """The test samples that this rank has computed, and what the loss comes to."""
    run = RunConfig(folder=str(folder), tensorboard=False)
    recipe = changed(RECIPE, train={"steps": 1}, parallel=parallel, run=run)
    small = small_data(30, 1)
    test = Asked(small.inputs, small.targets, 4)
    found = firecaffe.train(recipe, Net, small_data(68), test)
    return test.asked, found.test_loss


def test_by_the_trick_ranks_evaluate_samples_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """Five batches, of which the last one has two samples."""
    found = ranks.shared(4, evaluated, LAYOUTS["trick 2 x 2"], tmp_path / "trick")
    assert sorted(each for asked, _ in found for each in asked) == list(range(30))
    assert [len(asked) for asked, _ in found] == [7 + 2, 7, 7, 7]
    same = ranks.shared(4, evaluated, LAYOUTS["2 x 2"], tmp_path / "rows")
    assert [len(asked) for asked, _ in same] == [7 + 7 + 2, 7 + 7 + 2, 7 + 7, 7 + 7]
    assert {loss for _, loss in (*found, *same)} == {found[0][1]}


@cache
def kept() -> Net:
    return Net()


def fit_kept(recipe: Recipe, folder: Path) -> str:
    kept.cache_clear()
    return Training(kept, 68).error(recipe, folder)


def test_a_function_that_keeps_its_network(ranks: Ranks, tmp_path: Path) -> None:
    recipe = changed(RECIPE, parallel=LAYOUTS["model 2"])
    for said in ranks.shared(2, fit_kept, recipe, tmp_path / "run"):
        assert "model() returned the network that it had made before" in said
