"""One model over rows and columns of ranks: any layout comes to the bits of one worker.

Layouts, codecs and norms of fully connected layers are in the matrix (`test_matrix.py`).
"""

import dataclasses
import json
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
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.load import find_weights
from firecaffe.training.state import stored_piece
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
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
RATES = {"base_lr": 0.1, "lr_mult": {"*.bias": 2.0, "features.6.branch4.*": 0.5}}
NORMS: dict[str, Any] = {"type": "lamb", "clip_gradients": 0.5, **RATES}

TRICK: Any = "one_weird_trick"
LAYOUTS = {
    "model 2": ParallelConfig(1, 2, HEAD, 4),
    "model 4": ParallelConfig(1, 4, HEAD, 4),
    "2 x 2": ParallelConfig(2, 2, HEAD, 4),
    "trick 2 x 2": ParallelConfig(2, 2, HEAD, 4, TRICK),
}
ALONE = ParallelConfig(split=HEAD, parts=4)


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


def test_a_split_run_is_read_as_any_other(trained: Trained) -> None:
    """Its checkpoint has whole tensors by the network's own names."""
    result = trained(4, changed(RECIPE, parallel=LAYOUTS["trick 2 x 2"]), NET)
    assert end(result) == end(trained(1, changed(RECIPE, parallel=ALONE), NET))
    assert all(rank.waits_s["activations"] > 0 for rank in explain(result.folder).ranks)
    network, fresh = firecaffe.load(result.folder, Net), Net()
    averages = load_file(result.folder / "checkpoints/step-00000004/ema.safetensors")
    assert averages.keys() == dict(fresh.named_parameters()).keys()
    assert all(network.get_parameter(name).equal(each) for name, each in averages.items())
    taken = load_weights(fresh, find_weights(str(result.folder))[0])
    assert (taken.taken, taken.missing, taken.unexpected) == (len(fresh.state_dict()), [], [])


@pytest.mark.parametrize(
    ("split", "name"),
    [(ALL, "model 2"), (PATHS, "2 x 2"), (ROWS, "2 x 2")],
    ids=["layers", "paths", "rows"],
)
def test_norms_over_parts_and_statistics_estimated_again(
    trained: Trained, split: dict[str, str], name: str
) -> None:
    recipe = changed(RECIPE, solver=NORMS, train={"batch_norm_samples": 54, "steps": 3})
    layout = dataclasses.replace(LAYOUTS[name], split=split)
    # 2 x 2: as if between hosts
    memory = ExchangeConfig(shared_memory=layout.data != 2)
    workers = layout.data * layout.model
    result = trained(workers, changed(recipe, parallel=layout, exchange=memory), NET)
    alone = trained(1, changed(recipe, parallel=layout.over(1, 1), exchange=memory), NET)
    assert end(result) == end(alone)
    estimated = stored_piece(load_newest(result.folder)[0], "batch_norm")
    floats = {name for name, each in Net().named_buffers() if each.is_floating_point()}
    assert estimated.keys() == floats
    expected, state = (firecaffe.load(each.folder, Net).state_dict() for each in (alone, result))
    assert all(each.equal(state[name]) for name, each in expected.items())


def loud(logits: Tensor, labels: Tensor) -> Tensor:
    return 20 * F.cross_entropy(logits, labels)


def test_a_loss_scale_of_float16(trained: Trained) -> None:
    """Gradients of one part overflow before those of the others."""
    recipe = changed(
        RECIPE,
        train={"autocast": "float16", "steps": 6},
        model={"freeze": ["features.*", "classifier.[03].*"]},
        solver={"clip_gradients": 0.3},
    )
    training = Training(Net, 68, 0, loud)
    alone = trained(1, changed(recipe, parallel=ALONE), training)
    meta = json.loads((checkpoint_of(alone, 6) / "meta.json").read_text())
    assert meta["scaler"]["scale"] < 65_536 / 8
    assert end(trained(4, changed(recipe, parallel=LAYOUTS["trick 2 x 2"]), training)) == end(alone)


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Linear(63, 240), nn.Dropout(0.5), nn.Linear(240, 4))


@pytest.mark.parametrize("codec", ["int8", "power_sgd"])
def test_encoded_gradients(trained: Trained, codec: str) -> None:
    """By rows, and of all together; other codecs, and resumes, are in the matrix."""
    words = {"classifier.*": "neurons"}
    alone, trick = ParallelConfig(split=words, parts=4), ParallelConfig(1, 2, words, 4, TRICK)
    coded = {"compressor": codec, "compressor_level": 1}
    recipe = changed(RECIPE, exchange=coded, train={"steps": 3}, parallel=alone)
    expected = trained(1, recipe, Training(Wide, 68))
    assert end(trained(2, changed(recipe, parallel=trick), Training(Wide, 68))) == end(expected)


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
    recipe = changed(RECIPE, train={"autocast": "bfloat16", "steps": 3})
    training = Training(make, 68, 0, loss_of)
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
    alone = changed(recipe, parallel=ParallelConfig(1, 1, HEAD, 4, TRICK))
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
    by_trick = ranks.shared(4, evaluated, LAYOUTS["trick 2 x 2"], tmp_path / "trick")
    assert sorted(each for asked, _ in by_trick for each in asked) == list(range(30))
    assert [len(asked) for asked, _ in by_trick] == [7 + 2, 7, 7, 7]
    same = ranks.shared(4, evaluated, LAYOUTS["2 x 2"], tmp_path / "rows")
    assert [len(asked) for asked, _ in same] == [7 + 7 + 2, 7 + 7 + 2, 7 + 7, 7 + 7]
    assert {loss for _, loss in (*by_trick, *same)} == {by_trick[0][1]}


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
