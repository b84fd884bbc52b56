"""BatchNorm statistics for evaluations: torch's own, and no bit of the training depends on them."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import firecaffe
from firecaffe import Recipe, SynchronyConfig
from firecaffe.cluster.world import World
from firecaffe.data import Batches, DataConfig, SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.parts import Parts
from firecaffe.training.verification import replay
from tests.unit.training.served.test_trainings import data, network, recipe

SAMPLES, LEAF, PER_STEP = 50, 4, 8
"""12 whole micro-batches, of two steps."""

TRAIN, TEST, VALIDATION = data(300, 0), data(100, 1), data(40, 2)
ALONE = World(0, 1, torch.device("cpu"))

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
    found = recipe(folder, {}, **{"steps": 12, "batch_norm_samples": samples, **train})
    return dataclasses.replace(found, synchrony=words, data=DataConfig())


def fit(wanted: Recipe, make: Any = network) -> firecaffe.Result:
    return firecaffe.train(wanted, make, TRAIN, TEST, validation_set=VALIDATION)


def torchs(net: nn.Module) -> dict[str, Tensor]:
    """The buffers that torch gives a copy of a network."""
    net = copy.deepcopy(net).train()
    batches = Batches(TRAIN, SampleOrder(1, 300, PER_STEP * LEAF, LEAF), DataConfig())
    leaves = [divmod(place, PER_STEP) for place in range(SAMPLES // LEAF)]
    update_bn([batches.train_batch(*leaf)[0] for leaf in leaves], net)
    return dict(net.named_buffers())


def running(net: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in net.named_buffers() if each.is_floating_point()}


@pytest.mark.parametrize("name", CASES)
def test_evaluations_take_torchs_statistics_and_the_training_its_own(
    name: str, tmp_path: Path
) -> None:
    words, decay = CASES[name]
    plain = fit(made(tmp_path / "plain", words, 0, ema_decay=decay))
    run = tmp_path / "run"
    result = fit(made(run, words, SAMPLES, ema_decay=decay, eval_every=5))
    assert (result.weights_sha256, result.state_sha256) == (
        plain.weights_sha256,
        plain.state_sha256,
    )
    assert result.test_loss != plain.test_loss
    expected = torchs(result.model)
    for where, found in running(result.model).items():
        torch.testing.assert_close(found, expected[where], rtol=1e-5, atol=1e-6)
    # Whoever loads the run, or any of its checkpoints, has the network that was evaluated.
    for folder in (run, *(run / "checkpoints").glob("step-*")):
        net = firecaffe.load(folder, network)
        expected = torchs(net)
        for where, found in running(net).items():
            torch.testing.assert_close(found, expected[where], rtol=1e-5, atol=1e-6)
    assert all(
        torch.equal(found, running(result.model)[where])
        for where, found in running(firecaffe.load(run, network)).items()
    )


def test_a_run_that_was_ended_is_replayed_to_its_checkpoint(tmp_path: Path) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    fit(made(run, SERVED, SAMPLES))
    (run / "result.json").unlink()
    parts = Parts(network, train=TRAIN, test=TEST, validation=VALIDATION)
    assert replay(run, recipe_of(run), ALONE, to, parts).is_same
    saved, again = load_newest(run)[0].tensors, load_newest(to)[0].tensors
    names = [name for name in saved if name.startswith("batch_norm/")]
    assert names == ["batch_norm/1.running_mean", "batch_norm/1.running_var"]
    assert all(torch.equal(saved[name], again[name]) for name in names)


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
