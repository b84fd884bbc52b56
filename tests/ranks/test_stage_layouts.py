"""A recipe's network in stages, or in parts and stages: any layout comes to the bits of one worker.

Two stages and other words beside them are in the matrix (`test_matrix.py`).
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    ParallelConfig,
    Recipe,
    Result,
    ShareConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.models.googlenet import HeadedLogits
from tests.kit.training import recipe_with
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
from tests.world import Ranks

# 8 micro-batches of 4 over 70 samples: steps 3 and 6 end an epoch with one micro-batch of 4, one of
# 2, and six that are empty.
RECIPE = recipe_with("""
model.freeze=["norm.*","last.bias"] train.global_batch_size=32 train.micro_batch_size=4
train.steps=4 train.seed=5 train.device=cpu train.ema_decay=0.8 train.eval_batch_size=8
train.eval_every=3 solver.base_lr=0.02 solver.momentum=0.9 solver.weight_decay=1e-3
solver.decay_mult={"@vector":0.0,"last.*":2.0} solver.clip_gradients=0.5
solver.momentum_form=caffe solver.momentum_correction=True solver.lr_policy=poly checkpoint.every=2
""")

LAYOUTS = {
    "2 x 2": ParallelConfig(2, stages=["middle.3"], pipeline="gpipe"),
    "4 stages": ParallelConfig(stages=["middle", "middle.3", "middle.6"]),
}
"""Of 4 stages the third one has no weights."""


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


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.3 * torch.rand_like(x))


class Odd(Net):
    """Weights of two types in turns; noise, and batch normalization behind the dropouts of two
    stages. One rank alone has a buffer in double precision.
    """

    def __init__(self) -> None:
        super().__init__()
        conv, *others = self.middle
        first = [Cast(torch.float64), conv.double(), Cast(torch.float32), *others, Noise()]
        last = [nn.Dropout(0.5), nn.BatchNorm1d(12), Noise(), Cast(torch.float64)]
        self.middle = nn.Sequential(*first, *last)
        self.last.double()
        self.register_buffer("precise", torch.zeros(2, dtype=torch.float64))


NET = Training(Net, 70, 20)


def test_a_run_in_stages_is_read_as_any_other(trained: Trained) -> None:
    """Its checkpoint has all tensors by their names, those too that no stage calls."""
    result = trained(4, changed(RECIPE, parallel=LAYOUTS["4 stages"]), NET)
    alone, folder = trained(1, RECIPE, NET), result.folder
    assert end(result) == end(alone)
    assert [row["loss"] for row in result.history] == [row["loss"] for row in alone.history]
    network = firecaffe.load(folder, Net)
    averages = load_file(folder / "checkpoints/step-00000004/ema.safetensors")
    trained_ones = {name for name, each in network.named_parameters() if name in averages}
    assert len(trained_ones) == len(averages) == 16
    for name in trained_ones:
        assert network.get_parameter(name).equal(averages[name]), name
    assert_same_state(Net, result, alone)
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


def assert_same_state(network: Callable[[], nn.Module], result: Result, alone: Result) -> None:
    state, expected = (
        firecaffe.load(each.folder, network).state_dict() for each in (result, alone)
    )
    assert state.keys() == expected.keys()
    assert all(map(torch.equal, state.values(), expected.values()))


def test_an_update_in_shards_of_stages(trained: Trained) -> None:
    """Owners within a column agree on norms over all; one of the stages has no weights."""
    shards = changed(
        RECIPE, exchange=ExchangeConfig(update_at="shards"), parallel=LAYOUTS["4 stages"]
    )
    result = trained(4, shards, NET)
    on = trained(2, RECIPE, NET, checkpoint_of(result, 2))
    assert end(on) == end(result) == end(trained(1, RECIPE, NET))


def test_norms_of_several_types_draws_and_statistics_estimated_again(trained: Trained) -> None:
    recipe = changed(RECIPE, train={"batch_norm_samples": 54, "steps": 3})
    training = Training(Odd, 70, 20)
    alone = trained(1, recipe, training)
    layout = ParallelConfig(stages=["middle.1", "middle.7", "middle.10"])
    result = trained(4, changed(recipe, parallel=layout), training)
    assert end(result) == end(alone)
    assert_same_state(Odd, result, alone)


def loud(outputs: Tensor | HeadedLogits, labels: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return 20 * F.cross_entropy(logits, labels)


LOUD = Training(Net, 70, 0, loud)
OVERFLOWS = changed(
    RECIPE,
    train={"autocast": "float16", "steps": 6, "eval_every": 0},
    model={"freeze": ["norm.*", "middle.*", "head.*"]},
    exchange={"compressor": "one_bit"},
    checkpoint=CheckpointConfig(1, keep_last=0),
)


def scale_at(checkpoint: Path) -> float:
    return float(json.loads((checkpoint / "meta.json").read_text())["scaler"]["scale"])


def test_a_step_that_overflows_leaves_no_trace_in_a_codec(trained: Trained) -> None:
    """Gradients of the last stage overflow, the first one's do not; the third has no weights.
    What one_bit kept back before it is kept back again, and in the gradient's own units.
    """
    alone = trained(1, OVERFLOWS, LOUD)
    saved = [checkpoint_of(alone, step) for step in range(1, 7)]
    kept = [load_file(each / "compressor.safetensors") for each in saved]
    scales = list(map(scale_at, saved))
    assert scales[-1] < 65_536 / 4
    skipped = [now < before for before, now in pairwise([65_536, *scales])]
    assert skipped[0]
    assert not all(skipped)
    for is_skipped, before, now in zip(skipped, [{}, *kept], kept, strict=False):
        is_same = all(each.equal(before.get(name, 0 * each)) for name, each in now.items())
        assert is_same == is_skipped
    assert end(trained(4, changed(OVERFLOWS, parallel=LAYOUTS["4 stages"]), LOUD)) == end(alone)


class NoWeights(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 4), nn.ReLU())


def test_a_stage_without_weights_has_an_exchange_to_choose(trained: Trained) -> None:
    """Its column sums the loss alone, beside one that sums gradients."""
    recipe = Recipe(
        train=TrainConfig(48, 4, steps=3, device="cpu"),
        exchange=ExchangeConfig(algorithm="auto", shared_memory=False),
    )
    training, layout = Training(NoWeights), ParallelConfig(2, stages=["2"])
    result = trained(4, changed(recipe, parallel=layout), training)
    assert end(result) == end(trained(1, recipe, training))


def test_a_number_that_is_not_finite_is_told_by_all_as_by_one(ranks: Ranks, tmp_path: Path) -> None:
    recipe = changed(RECIPE, solver={"base_lr": 1e30, "clip_gradients": 0.0})
    [expected] = ranks.shared(1, NET.error, recipe, tmp_path / "alone")
    assert "first gradient in network order" in expected
    staged = changed(recipe, parallel=LAYOUTS["2 x 2"])
    assert ranks.shared(4, NET.error, staged, tmp_path / "run") == [expected] * 4


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 5, 3, padding=1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
        *(nn.Flatten(), nn.Linear(180, 21), nn.GELU(), nn.Linear(21, 4)),
    )


FIXED: dict[str, Any] = {
    "share": ShareConfig({"3": 2}, train=False),
    "exchange": ExchangeConfig(update_at="shards", bucket_bytes=1500),
}


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        # A pool at an image's edge has fewer numbers in its mean: in parts, another rounding.
        pytest.param(
            ParallelConfig(0, 2, {"0": "rows"}, 2, stages=["1"]), {}, id="begins at a pool of rows"
        ),
        pytest.param(
            ParallelConfig(0, 2, {"3": "neurons", "5": "inputs"}, 2),
            FIXED,
            id="values are not trained, and some ranks have none",
        ),
    ],
)
def test_what_a_rank_has_or_has_not(
    trained: Trained, layout: ParallelConfig, sections: dict[str, Any]
) -> None:
    train = TrainConfig(32, 4, steps=4, seed=5, device="cpu")
    solver = SolverConfig(base_lr=0.02, momentum=0.9)
    recipe = Recipe(train=train, solver=solver, parallel=layout, **sections)
    alone = trained(1, changed(recipe, parallel=layout.over(1, 1)), Training(net, 70))
    assert end(trained(4, recipe, Training(net, 70))) == end(alone)
