"""A loss, a gradient or a weight that is not finite ends the run on all ranks, in one step."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import CheckpointConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.errors import NotFiniteError
from firecaffe.training.checkpoint import load_newest
from tests.ranks.networks import small_data
from tests.world import Ranks

EVERY = 2
BREAKS = 5
"""The step, from 1, in which a number breaks."""

SAMPLES, BATCH, MICRO_BATCH = 60, 8, 2
MARK = 100.0
"""In the corner of the image that breaks it."""


def marked_data() -> TensorDataset:
    """Images of which one is marked, that has its turn in step BREAKS."""
    order = SampleOrder(TrainConfig().seed, SAMPLES, BATCH, MICRO_BATCH)
    data = small_data(SAMPLES)
    data.inputs[order.micro_batch(BREAKS - 1, 3)[0], 0, 0, 0] = MARK
    return data


class Breaks(nn.Module):
    """Two layers, of which one gets a gradient of one value where an image is marked; or the
    outputs are multiplied by it.
    """

    def __init__(self, layer: str, value: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(36, 8), nn.Linear(8, 4)
        self.layer, self.value = layer, value

    def forward(self, images: Tensor) -> Tensor:
        is_marked = bool((images[:, 0, 0, 0] == MARK).any())
        rest = images.flatten(1)[:, 1:]
        hidden = torch.relu(self.first(nn.functional.pad(rest, (1, 0))))
        if is_marked and self.layer:
            hidden = hidden + _Spoil.apply(getattr(self, self.layer).weight, self.value)  # type: ignore[no-untyped-call]
        outputs: Tensor = self.second(hidden)
        return outputs * self.value if is_marked and not self.layer else outputs


class _Spoil(torch.autograd.Function):
    """Adds nothing, and gives a weight a gradient of one value."""

    @staticmethod
    def forward(context: Any, weight: Tensor, value: float) -> Tensor:
        context.value, context.shape = value, weight.shape
        return weight.new_zeros(())

    @staticmethod
    def backward(context: Any, *_: Any) -> tuple[Tensor, None]:
        return torch.full(context.shape, context.value), None


def recipe_in(folder: Path, **solver: Any) -> Recipe:
    return Recipe(
        train=TrainConfig(global_batch_size=BATCH, micro_batch_size=MICRO_BATCH, steps=9),
        solver=dataclasses.replace(SolverConfig(), **solver),
        checkpoint=CheckpointConfig(every=EVERY, keep_last=1),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )


def fit(folder: Path, layer: str, value: float, **solver: float) -> str:
    """What ends a training."""
    recipe, network = recipe_in(folder, **solver), partial(Breaks, layer, value)
    try:
        firecaffe.train(recipe, network, marked_data(), small_data(20, 1))
    except NotFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layer", "value", "words"),
    [
        ("second", math.nan, ["the loss is 1.", "second.weight"]),
        ("first", math.inf, ["the loss is 1.", "first.weight"]),
        ("", math.nan, ["the loss is nan", "first.weight"]),
    ],
)
def test_the_step_the_layer_and_the_last_good_checkpoint_are_named(
    tmp_path: Path, layer: str, value: float, words: list[str]
) -> None:
    said = fit(tmp_path / "run", layer, value)
    good = tmp_path / "run" / "checkpoints" / "step-00000004"
    for word in (*words, "learning rate is 0.01", str(good)):
        assert word in said
    fault = json.loads((tmp_path / "run" / "fault.json").read_text())
    assert (fault["kind"], fault["step"], fault["exit_code"]) == ("not_finite", BREAKS, 18)
    assert said in fault["line"]
    newest, damaged = load_newest(tmp_path / "run")
    assert (newest.folder, damaged) == (good, [])
    assert all(tensor.isfinite().all() for tensor in newest.tensors.values())
    assert not (tmp_path / "run" / "result.json").exists()


def test_weights_that_overflow_in_an_update_are_not_saved(tmp_path: Path) -> None:
    """The gradients of the step before are finite still."""
    said = fit(tmp_path / "run", "", 1.0, base_lr=3e38)
    assert "is not finite" in said
    assert "3e+38" in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


def test_a_norm_beyond_float32_is_not_clipped_to_nothing(tmp_path: Path) -> None:
    said = fit(tmp_path / "run", "first", 1e38, clip_gradients=1.0)
    assert "the norm of the gradient" in said


def fit_on_rank(folder: str) -> str:
    return fit(Path(folder), "second", math.nan)


def test_all_ranks_say_the_same(ranks: Ranks, tmp_path: Path) -> None:
    said, other = ranks.run(2, fit_on_rank, str(tmp_path / "run"))
    assert said == other
    assert "second.weight" in said
    fault = json.loads((tmp_path / "run" / "fault.json").read_text())
    assert (fault["rank"], fault["step"], fault["earlier"]) == (0, BREAKS, [])
