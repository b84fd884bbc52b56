"""A loss that stays far above its start ends a training; no other loss does."""

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import SynchronyConfig, TensorDataset
from firecaffe.errors import DivergedError
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.divergence import LAST, PATIENCE, LossRise, replica_advice, server_advice
from tests.kit.training import data, fit_points, recipe_in
from tests.kit.training_fixtures import Patch


def alarm(losses: Sequence[float]) -> int:
    """The step, from 1, at which it is told; 0 if it never is."""
    rise = LossRise()
    for step, loss in enumerate(losses, 1):
        rise.add(loss)
        if rise.line:
            return step
    return 0


@pytest.mark.parametrize("start", [0.0, 0.3, 2.3, 900.0, -5.0])
def test_it_is_told_after_so_many_steps(start: float) -> None:
    """Half of the last steps are above at first, so the median is between the two."""
    high = start + 3 * max(1.0, abs(start))
    assert alarm([start] * 50 + [high] * 500) == 50 + LAST // 2 + PATIENCE - 1
    assert alarm([start] * 50 + [high] * (PATIENCE - 2) + [start] * 500) == 0
    assert alarm([start] * 50 + ([high] * 60 + [start] * 60) * 5) == 0  # counted anew


@pytest.mark.parametrize("seed", range(3))
def test_no_training_that_goes_well_is_ended(seed: int) -> None:
    draw = random.Random(seed)
    noise = [draw.lognormvariate(0, 0.3) for _ in range(2000)]
    spikes = [100.0 if draw.random() < 0.2 else 1.0 for _ in noise]
    flat = [2.3 * each for each in noise]  # a rate that warms up for long
    assert alarm(flat) == 0
    assert alarm([each * spike for each, spike in zip(flat, spikes, strict=True)]) == 0
    falls = [2.3 * each * 0.999**step + 0.05 for step, each in enumerate(noise)]
    assert alarm(falls) == 0
    restarts = [each if step % 500 > 200 else 2.3 for step, each in enumerate(falls)]
    assert alarm(restarts) == 0
    fine_tuned = [0.05 if step < 10 else 0.6 * each for step, each in enumerate(noise)]
    assert alarm(fine_tuned) == 0


def test_the_state_with_the_lowest_loss_is_told() -> None:
    rise = LossRise()
    assert not rise.record_save()
    told = []
    for loss in (2.0, 1.5, 1.6, 0.9, 5.0, 9.0):
        rise.add(loss)
        told.append(rise.record_save())
    assert told == [True, True, True, True, False, False]  # medians 2, 1.75, 1.6, 1.55, 1.6, 1.8


SERVED = SynchronyConfig("asynchronous", clock="simulated", learners=16, speeds="gamma", spread=0.5)
REPLICAS = SynchronyConfig("local", replicas=4, local_steps=4)


def network() -> nn.Module:
    layers = nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def linear() -> nn.Module:
    """None whose units can all come to 0, after which the loss is that of guessing."""
    return nn.Linear(2, 4)


SAMPLES, DRAWN = data(300, 0), torch.Generator().manual_seed(1)
NO_SENSE = TensorDataset(SAMPLES.inputs, torch.randint(0, 4, (300,), generator=DRAWN))
"""Labels that follow from nothing."""


WORDS = """
train.global_batch_size=32 train.micro_batch_size=4 train.seed=1 checkpoint.every=4
checkpoint.keep_last=2
"""


def train(
    folder: Path, words: SynchronyConfig, solver: str, steps: int = 110, **more: Any
) -> firecaffe.Result:
    words_of_run = f"{WORDS} train.steps={steps} {solver}"
    recipe = dataclasses.replace(recipe_in(folder, words_of_run), synchrony=words)
    return fit_points(recipe, **{"model": network, "train_set": SAMPLES, **more})


FAST = "solver.momentum=0.9 solver.warmup_steps=10"
CASES: dict[str, dict[str, Any]] = {
    "served": {"words": SERVED, "solver": f"{FAST} solver.base_lr=0.2"},
    "local": {
        "words": REPLICAS,
        "solver": f"{FAST} solver.base_lr=5.0",
        "model": linear,
        "train_set": NO_SENSE,
    },
}
TOLD = {
    "served": ("gradients of 16 learners come late", "delayed_nesterov, or warm_steps"),
    "local": ("4 replicas train by themselves", "shorter rounds than"),
}


SOON = 30
"""Steps after which it is told here."""


@pytest.mark.parametrize("name", CASES)
def test_a_training_that_diverges_ends(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("firecaffe.training.divergence.PATIENCE", SOON)
    case, run = CASES[name], tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        train(run, **case)
    line, good = str(caught.value), run / "checkpoints" / "good"
    for part in (*TOLD[name], "far above its start, 1.", "momentum 0.9", "learning rate is"):
        assert part in line
    assert len(line.splitlines()) == 1
    # The checkpoint from before the rise has stayed, though newer ones have come and gone.
    kept = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert len(kept) == 3
    assert kept[0] == good.read_text().strip()
    assert f"the last good checkpoint is {run / 'checkpoints' / kept[0]}" in line
    assert load_newest(good)[0].step <= 20
    assert firecaffe.load(good, case.get("model", network)) is not None
    fault = json.loads((run / "fault.json").read_text())
    assert (fault["kind"], fault["exit_code"]) == ("diverged", 19)
    assert SOON < fault["step"] < SOON + 60
    with pytest.raises(DivergedError) as again:
        train(tmp_path / "on", resume=run / "checkpoints" / kept[1], **case)
    assert again.value.step == caught.value.step


def test_what_was_done_already_is_not_advised() -> None:
    done: dict[str, Any] = {"staleness_rate": "inverse", "server_momentum": "delayed_nesterov"}
    said = server_advice(dataclasses.replace(SERVED, **done, warm_steps=3), 16, 14.2, 0.9)
    assert "14.20" in said
    assert not any(word in said for word in (*done, "warm_steps"))
    assert "late" not in server_advice(SynchronyConfig("backup"), 4, 0.0, 0.9)
    lockless = server_advice(SynchronyConfig("asynchronous", lock="none"), 4, 3.0, 0.9)
    assert not any(word in lockless for word in ("staleness_rate", "delayed"))  # which it refuses
    one = dataclasses.replace(REPLICAS, local_steps=1, outer="nesterov")
    assert "synchrony.outer_lr" in replica_advice(one, 0.9)


def test_the_steps_that_all_make_together_are_not_watched(tmp_path: Path) -> None:
    with patch("firecaffe.training.divergence.PATIENCE", 0):
        train(tmp_path / "run", SynchronyConfig(), "solver.base_lr=0.05", 12)
        with pytest.raises(DivergedError):
            train(tmp_path / "local", REPLICAS, "solver.base_lr=0.05", 12)
