"""A loss, a gradient or a weight that is not finite ends the run on all ranks, in one step."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.data import SampleOrder, TensorDataset
from firecaffe.errors import NotFiniteError
from firecaffe.training.checkpoint import load_newest
from tests.faults.runs import read
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


def fit(folder: Path, layer: str, value: float, resume: Path | None = None, **solver: Any) -> str:
    """What ends a training."""
    recipe = Recipe(
        train=TrainConfig(global_batch_size=BATCH, micro_batch_size=MICRO_BATCH, steps=9),
        solver=SolverConfig(**solver),
        checkpoint=CheckpointConfig(every=EVERY, keep_last=1),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )
    network = partial(Breaks, layer, value)
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
    said = fit(tmp_path / "run", layer, value)
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
    again = fit(tmp_path / "again", layer, value, resume=tmp_path / "run")
    assert str(good) in again


def test_weights_that_overflow_in_an_update_are_not_saved(tmp_path: Path) -> None:
    """The gradients of the step before are finite still."""
    said = fit(tmp_path / "run", "", 1.0, base_lr=3e38)
    assert "is not finite" in said
    assert "3e+38" in said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []
    # Nor is a norm beyond float32 clipped to nothing.
    said = fit(tmp_path / "clipped", "first", 1e38, clip_gradients=1.0)
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


def skip_all(
    folder: Path,
    synchrony: SynchronyConfig,
    resume: Path | None = None,
    network: type[nn.Module] = NeverFinite,
    steps: int = 4,
) -> str:
    recipe = Recipe(
        train=TrainConfig(
            global_batch_size=BATCH, micro_batch_size=MICRO_BATCH, steps=steps, autocast="float16"
        ),
        checkpoint=CheckpointConfig(every=EVERY),
        synchrony=synchrony,
        run=RunConfig(folder=str(folder), tensorboard=False),
    )
    with pytest.raises(NotFiniteError) as caught:
        firecaffe.train(recipe, network, small_data(60), small_data(20, 1), resume=resume)
    return str(caught.value)


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
    said = skip_all(tmp_path / "run", SynchronyConfig(), network=FiniteOnce, steps=200)
    assert "come to 0" in said
    assert str(tmp_path / "run/checkpoints/step-") in said
    assert 166 < read(tmp_path / "run" / "fault.json")["step"] < 172


def test_all_ranks_say_the_same(ranks: Ranks, tmp_path: Path) -> None:
    said, other = ranks.run(2, fit, tmp_path / "run", "second", math.nan)
    assert said == other
    assert "second.weight" in said
    fault = read(tmp_path / "run" / "fault.json")
    assert (fault["rank"], fault["step"], fault["earlier"]) == (0, BREAKS, [])
