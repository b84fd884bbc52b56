"""A loss, a gradient or a weight that is not finite ends the run on all ranks, in one step."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import CheckpointConfig, Recipe, SynchronyConfig, TrainConfig
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.errors import NotFiniteError
from firecaffe.training.checkpoint import load_newest
from tests.faults.runs import read
from tests.kit.worlds import changed
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


RECIPE = Recipe(
    train=TrainConfig(BATCH, MICRO_BATCH, steps=9), checkpoint=CheckpointConfig(every=EVERY)
)


def end_of(
    folder: Path, network: Callable[[], nn.Module], resume: Path | None = None, **sections: Any
) -> str:
    """What ends a training."""
    recipe = changed(RECIPE, run={"folder": str(folder), "tensorboard": False}, **sections)
    with pytest.raises(NotFiniteError) as caught:
        firecaffe.train(recipe, network, marked_data(), small_data(20, 1), resume=resume)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layer", "value", "loss"),
    [("second", math.nan, "1."), ("first", math.inf, "1."), ("", math.nan, "nan")],
)
def test_the_step_the_layer_and_the_last_good_checkpoint_are_named(
    tmp_path: Path, layer: str, value: float, loss: str
) -> None:
    network = partial(Breaks, layer, value)
    said = end_of(tmp_path / "run", network)
    good = tmp_path / "run" / "checkpoints" / "step-00000004"
    weight = f"{layer or 'first'}.weight"
    for word in (f"the loss is {loss}", weight, "learning rate is 0.01", str(good)):
        assert word in said
    fault = read(tmp_path / "run" / "fault.json")
    assert (fault["kind"], fault["step"], fault["exit_code"]) == ("not_finite", BREAKS, 18)
    assert said in fault["line"]
    newest, damaged = load_newest(tmp_path / "run")
    assert (newest.folder, damaged) == (good, [])
    assert all(tensor.isfinite().all() for tensor in newest.tensors.values())
    assert not (tmp_path / "run" / "result.json").exists()
    assert str(good) in end_of(tmp_path / "again", network, tmp_path / "run")


def test_weights_that_overflow_in_an_update_are_not_saved(tmp_path: Path) -> None:
    """The gradients of the step before are finite still."""
    said = end_of(tmp_path / "run", partial(Breaks, "", 1.0), solver={"base_lr": 3e38})
    assert "is not finite" in said
    assert "3e+38" in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []
    # Nor is a norm beyond float32 clipped to nothing.
    clipped = {"clip_gradients": 1.0}
    said = end_of(tmp_path / "clipped", partial(Breaks, "first", 1e38), solver=clipped)
    assert "the norm of the gradient" in said


class NeverFinite(nn.Module):
    """Its loss is finite, the gradient of each micro-batch is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 4)

    def forward(self, images: Tensor) -> Tensor:
        nothing: Tensor = _Spoil.apply(self.layer.weight, math.nan)  # type: ignore[no-untyped-call]
        return torch.add(self.layer(images.flatten(1)), nothing)


class FiniteOnce(NeverFinite):
    """Its gradient is not finite once its bias has been updated."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.layer(images.flatten(1))
        return super().forward(images) if bool(self.layer.bias.any()) else outputs


def skip_all(folder: Path, synchrony: SynchronyConfig, resume: Path | None = None) -> str:
    train = {"steps": 4, "autocast": "float16"}
    return end_of(folder, NeverFinite, resume, train=train, synchrony=synchrony)


@pytest.mark.parametrize(
    "synchrony",
    [
        SynchronyConfig(),
        SynchronyConfig(mode="local", replicas=2, local_steps=2),
        SynchronyConfig(mode="asynchronous", server="sharded"),
    ],
    ids=["every_step", "local", "asynchronous"],
)
def test_a_training_without_updates_is_no_training(
    ranks: Ranks, tmp_path: Path, synchrony: SynchronyConfig
) -> None:
    """The loss scale takes each gradient for an overflow. A resume tells it of all steps, too."""
    said, other = ranks.run(2, skip_all, tmp_path / "run", synchrony)
    assert said == other
    assert "all 4 steps" in said
    fault = read(tmp_path / "run" / "fault.json")
    assert (fault["kind"], fault["step"], fault["exit_code"]) == ("not_finite", 4, 18)
    assert not (tmp_path / "run" / "result.json").exists()
    middle = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert ranks.run(2, skip_all, tmp_path / "again", synchrony, middle)[0] == said


def test_a_loss_scale_of_0_trains_nothing(tmp_path: Path) -> None:
    """It has halved so often: from 2^16 to below 2^-149."""
    said = end_of(tmp_path / "run", FiniteOnce, train={"steps": 200, "autocast": "float16"})
    assert "come to 0" in said
    assert str(tmp_path / "run/checkpoints/step-") in said
    assert 166 < read(tmp_path / "run" / "fault.json")["step"] < 172


def test_all_ranks_say_the_same(ranks: Ranks, tmp_path: Path) -> None:
    said, other = ranks.run(2, end_of, tmp_path / "run", partial(Breaks, "second", math.nan))
    assert said == other
    assert "second.weight" in said
    fault = read(tmp_path / "run" / "fault.json")
    assert (fault["rank"], fault["step"], fault["earlier"]) == (0, BREAKS, [])
