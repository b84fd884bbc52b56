"""What evaluations take in the place of weights: BatchNorm statistics that are torch's own, on
which no bit of the training depends, and the moving average against torch's.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import firecaffe
from firecaffe import Recipe, SynchronyConfig
from firecaffe.data import Batches, DataConfig, SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.training.evaluation_weights import Ema
from tests.kit.training import data, fit_points, network, recipe_of_points

SAMPLES, LEAF, PER_STEP = 50, 4, 8
"""12 whole micro-batches, of two steps."""

TRAIN, TEST, VALIDATION = data(300, 0), data(100, 1), data(40, 2)

EVERY_STEP = SynchronyConfig()
REPLICAS = SynchronyConfig("local", replicas=4, local_steps=4)
SERVED = SynchronyConfig("asynchronous", clock="simulated", speeds="gamma", spread=0.5)
CASES: dict[str, tuple[SynchronyConfig, float]] = {
    "every_step": (EVERY_STEP, 0.0),
    "every_step, averaged": (EVERY_STEP, 0.9),
    "asynchronous, averaged": (SERVED, 0.9),
    "local": (REPLICAS, 0.0),
}


def made(folder: Path, words: SynchronyConfig, samples: int, **train: Any) -> Recipe:
    length = {"steps": 12, "batch_norm_samples": samples, **train}
    recipe = recipe_of_points(folder, {}, **length)
    return dataclasses.replace(recipe, synchrony=words, data=DataConfig())


def fit(recipe: Recipe, make: Any = network) -> firecaffe.Result:
    return fit_points(recipe, model=make, validation_set=VALIDATION)


def torchs(net: nn.Module) -> dict[str, Tensor]:
    """The buffers that torch gives a copy of a network."""
    net = copy.deepcopy(net).train()
    batches = Batches(TRAIN, SampleOrder(1, 300, PER_STEP * LEAF, LEAF), DataConfig())
    leaves = [divmod(place, PER_STEP) for place in range(SAMPLES // LEAF)]
    update_bn([batches.train_batch(*leaf)[0] for leaf in leaves], net)
    return running(net)


def running(net: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in net.named_buffers() if each.is_floating_point()}


@pytest.mark.parametrize("name", CASES)
def test_evaluations_take_torchs_statistics_the_training_its_own(name: str, tmp_path: Path) -> None:
    words, decay = CASES[name]
    plain = fit(made(tmp_path / "plain", words, 0, ema_decay=decay))
    run = tmp_path / "run"
    result = fit(made(run, words, SAMPLES, ema_decay=decay, eval_every=5))
    assert result.weights_sha256 == plain.weights_sha256
    assert result.state_sha256 == plain.state_sha256
    assert result.test_loss != plain.test_loss
    # Whoever loads the run, or any of its checkpoints, has the network that was evaluated.
    folders = run, *(run / "checkpoints").glob("step-*")
    loaded = [firecaffe.load(folder, network) for folder in folders]
    for net in (result.model, *loaded):
        torch.testing.assert_close(running(net), torchs(net), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(running(loaded[0]), running(result.model), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("samples", "make", "line"),
    [
        (3, network, "batch_norm_samples is 3; it must be 0, or at least .* 4: whole"),
        (301, network, "batch_norm_samples is 301; there are 300 training samples"),
        (8, lambda: nn.Linear(2, 4), "is 8, but the network has no BatchNorm"),
    ],
)
def test_refused(samples: int, make: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line):
        fit(made(tmp_path / "run", EVERY_STEP, samples), make)


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each))


def test_it_is_torch_s_and_a_warm_up_forgets_the_first_weights_sooner() -> None:
    torch.manual_seed(1)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    ours, warm = (
        Ema(dict(model.named_parameters()), 0.9, warmup=is_warm) for is_warm in (False, True)
    )
    expected = first.weight.detach().double()
    for step in range(5):
        moved(model)
        theirs.update_parameters(model)
        ours.update(step)
        warm.update(step)
        for name, average in theirs.module.named_parameters():
            assert torch.equal(ours.average[name], average)
        decay = min(0.9, (1 + step) / (10 + step)) if step else 0.0
        expected = decay * expected + (1 - decay) * first.weight.detach()
        torch.testing.assert_close(warm.average["0.weight"], expected.float())


def test_in_the_weights_place_and_back() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(dict(model.named_parameters()), 0.5)
    ema.update(0)
    average = copy.deepcopy(model)
    moved(model)
    trained, inputs = copy.deepcopy(model), torch.rand(3, 2)
    memory = [each.data_ptr() for each in model.parameters()]
    with ema.in_place():
        assert torch.equal(model(inputs), average(inputs))
    assert torch.equal(model(inputs), trained(inputs))
    assert torch.equal(ema.average["weight"], average.weight)
    assert memory == [each.data_ptr() for each in model.parameters()]
    assert all(each.requires_grad for each in model.parameters())
