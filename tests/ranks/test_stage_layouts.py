"""A recipe's network in stages: any layout comes to the bits of one worker without stages.

Two stages and other words beside them are in the matrix (`test_matrix.py`).
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
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
    SolverConfig,
    TrainConfig,
)
from firecaffe.models.model import HeadedLogits
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
from tests.world import Ranks

# 8 micro-batches of 4 over 70 samples: steps 3 and 6 end an epoch with one micro-batch of 4, one of
# 2, and six that are empty.
RECIPE = Recipe(
    model=ModelConfig(freeze=["norm.*", "last.bias"]),
    train=TrainConfig(
        32, 4, steps=4, seed=5, device="cpu", ema_decay=0.8, eval_batch_size=8, eval_every=3
    ),
    solver=SolverConfig(
        base_lr=0.02,
        momentum=0.9,
        weight_decay=1e-3,
        decay_mult={"@vector": 0.0, "last.*": 2.0},
        clip_gradients=0.5,
        momentum_form="caffe",
        momentum_correction=True,
        lr_policy="poly",
    ),
    checkpoint=CheckpointConfig(every=2),
)

LAYOUTS = {
    "2 stages": ParallelConfig(stages=["middle"]),
    "2 x 2": ParallelConfig(2, stages=["middle.3"], pipeline="gpipe"),
    "4 stages": ParallelConfig(stages=["middle", "middle.3", "middle.6"]),
    "data 2": ParallelConfig(),
}
"""Of 4 stages the third one has no weights."""

WORKERS = {"2 stages": 2, "data 2": 2}
"""Of the layouts that are not for 4."""


class Net(nn.Module):
    """With parameters and buffers of its own, a head that is called in training alone, and what is
    never called.
    """

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.unused = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.full((6, 1, 1), 1.5))
        self.register_buffer("shift", torch.full((6, 1, 1), 0.25))
        self.last = nn.Linear(12, 4)
        self.middle = nn.Sequential(
            *(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 12), nn.ReLU()),
        )
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 4))

    def forward(self, x: Tensor) -> Tensor | HeadedLogits:
        y = self.norm(self.first(x)) * self.scale + self.shift
        side = self.head(y) if self.training else None
        z: Tensor = self.last(self.middle(y))
        return HeadedLogits(z, side, side) if side is not None else z


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Mixed(Net):
    """With weights of two types, in turns."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(self.middle.double())
        for each in layers[4:]:
            each.float()
        layers[4:4] = [Cast(torch.float32)]
        self.middle = nn.Sequential(Cast(torch.float64), *layers, Cast(torch.float64))
        self.last.double()


class Late(Net):
    """With batch normalization behind the dropouts of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.extend([nn.Dropout(0.5), nn.BatchNorm1d(12)])


NET = Training(Net, 70, 20)


@pytest.mark.parametrize("name", ["2 x 2", "4 stages"])
def test_any_layout(trained: Trained, name: str) -> None:
    found = trained(WORKERS.get(name, 4), changed(RECIPE, parallel=LAYOUTS[name]), NET)
    alone = trained(1, RECIPE, NET)
    assert end(found) == end(alone)
    assert [row["loss"] for row in found.history] == [row["loss"] for row in alone.history]


def test_an_update_in_shards_of_stages(trained: Trained) -> None:
    """Owners within a column agree on norms over all; one of the stages has no weights."""
    shards = changed(
        RECIPE, exchange=ExchangeConfig(update_at="shards"), parallel=LAYOUTS["4 stages"]
    )
    found = trained(4, shards, NET)
    on = trained(2, changed(RECIPE, parallel=LAYOUTS["data 2"]), NET, checkpoint_of(found, 2))
    assert end(on) == end(found) == end(trained(1, RECIPE, NET))


def test_a_run_in_stages_is_read_as_any_other(trained: Trained) -> None:
    """Its checkpoint has all tensors by their names, those too that no stage calls."""
    folder = trained(4, changed(RECIPE, parallel=LAYOUTS["4 stages"]), NET).folder
    network = firecaffe.load(folder, Net)
    averages = load_file(folder / "checkpoints/step-00000004/ema.safetensors")
    trained_ones = {name for name, each in network.named_parameters() if name in averages}
    assert len(trained_ones) == len(averages) == 16
    for name in trained_ones:
        assert network.get_parameter(name).equal(averages[name]), name
    expected = firecaffe.load(trained(1, RECIPE, NET).folder, Net).state_dict()
    found = network.state_dict()
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, found.values(), expected.values()))
    record = json.loads((folder / "result.json").read_text())
    assert record["parallel"] == {
        "data": 1,
        "stages": ["middle", "middle.3", "middle.6"],
        "pipeline": "1f1b",
        "idle_if_equal": 3 / 11,
    }
    idle = record["idle_by_stage"]
    assert len(idle) == 4
    assert all(0 < each < 1 for each in idle)
    assert record["frozen_parameters"] == 3


def test_the_norm_of_gradients_of_several_types(trained: Trained) -> None:
    recipe, mixed = changed(RECIPE, train={"steps": 3}), Training(Mixed, 70, 20)
    alone = trained(1, recipe, mixed)
    assert end(trained(2, changed(recipe, parallel=LAYOUTS["2 stages"]), mixed)) == end(alone)


def test_statistics_estimated_again(trained: Trained) -> None:
    recipe = changed(RECIPE, train={"batch_norm_samples": 54, "steps": 3})
    late = Training(Late, 70, 20)
    alone = trained(1, recipe, late)
    found = trained(4, changed(recipe, parallel=LAYOUTS["4 stages"]), late)
    assert end(found) == end(alone)
    expected, state = (firecaffe.load(each.folder, Late).state_dict() for each in (alone, found))
    assert all(each.equal(state[name]) for name, each in expected.items())


def loud(outputs: Tensor | HeadedLogits, labels: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return 20 * F.cross_entropy(logits, labels)


LOUD = Training(Net, 70, 0, loud)
OVERFLOWS = changed(
    RECIPE,
    train={"autocast": "float16", "steps": 6, "eval_every": 0},
    model={"freeze": ["norm.*", "middle.*", "head.*"]},
)


def scale_at(checkpoint: Path) -> float:
    return float(json.loads((checkpoint / "meta.json").read_text())["scaler"]["scale"])


def test_a_loss_scale_of_float16(trained: Trained) -> None:
    """Gradients of the last stage overflow, the first one's do not; the third has no weights."""
    alone = trained(1, OVERFLOWS, LOUD)
    assert scale_at(checkpoint_of(alone, 6)) < 65_536 / 4
    for name, workers in (("2 stages", 2), ("4 stages", 4)):
        assert end(trained(workers, changed(OVERFLOWS, parallel=LAYOUTS[name]), LOUD)) == end(alone)


def test_a_step_that_overflows_leaves_no_trace_in_a_codec(trained: Trained) -> None:
    """What one_bit kept back before it is kept back again, and in the gradient's own units."""
    recipe = changed(
        OVERFLOWS,
        exchange={"compressor": "one_bit"},
        checkpoint=CheckpointConfig(1, keep_last=0),
    )
    alone = trained(1, recipe, LOUD)
    saved = [checkpoint_of(alone, step) for step in range(1, 7)]
    kept = [load_file(each / "compressor.safetensors") for each in saved]
    skipped = [now < before for before, now in pairwise([65_536, *map(scale_at, saved)])]
    assert skipped[0]
    assert not all(skipped)
    for is_skipped, before, now in zip(skipped, [{}, *kept], kept, strict=False):
        is_same = all(each.equal(before.get(name, 0 * each)) for name, each in now.items())
        assert is_same == is_skipped
    assert end(trained(2, changed(recipe, parallel=LAYOUTS["2 stages"]), LOUD)) == end(alone)


class NoWeights(nn.Sequential):
    """Its last stage has none."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 4), nn.ReLU())


def test_a_stage_without_weights_has_an_exchange_to_choose(trained: Trained) -> None:
    """Its column sums the loss alone, beside one that sums gradients."""
    recipe = Recipe(
        train=TrainConfig(48, 4, steps=3, device="cpu"),
        exchange=ExchangeConfig(algorithm="auto", shared_memory=False),
    )
    staged, training = (
        changed(recipe, parallel=ParallelConfig(2, stages=["2"])),
        Training(NoWeights),
    )
    assert end(trained(4, staged, training)) == end(trained(1, recipe, training))


def test_a_number_that_is_not_finite_is_told_by_all_as_by_one(ranks: Ranks, tmp_path: Path) -> None:
    recipe = changed(RECIPE, solver={"base_lr": 1e30, "clip_gradients": 0.0})
    [expected] = ranks.shared(1, NET.error, recipe, tmp_path / "alone")
    assert "first gradient in network order" in expected
    for name in ("2 stages", "2 x 2"):
        workers, staged = WORKERS.get(name, 4), changed(recipe, parallel=LAYOUTS[name])
        assert ranks.shared(workers, NET.error, staged, tmp_path / name) == [expected] * workers
