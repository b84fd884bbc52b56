"""Whole trainings with a server: they learn, and go on from any checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    Recipe,
    Result,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TensorDataset,
    TrainConfig,
)
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.synchrony.config import SERVED
from firecaffe.training.join import join_run

MODES: dict[str, dict[str, Any]] = {
    "backup": {"mode": "backup", "backup_workers": 2},
    "again": {"mode": "backup", "backup_workers": 2, "dropped": "again"},
    "stale": {"mode": "stale", "max_staleness": 0, "warm_steps": 2},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse"},
    "softsync": {"mode": "asynchronous", "gradients_per_update": 3, "compensate": "delay"},
    "gap": {"mode": "asynchronous", "compensate": "gap", "server_momentum": "delayed_nesterov"},
    "encoded": {"mode": "asynchronous", "compressor": "one_bit"},
}
assert {words["mode"] for words in MODES.values()} == set(SERVED)


def data(count: int, seed: int) -> TensorDataset:
    """Four classes of points around corners."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    corners = torch.stack([labels % 2 * 2 - 1, labels // 2 * 2 - 1], 1).float()
    return TensorDataset(corners + 0.4 * torch.randn(count, 2, generator=generator), labels)


def network() -> nn.Module:
    layers = nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def recipe(folder: Path, words: dict[str, Any], **train: Any) -> Recipe:
    served = {"clock": "simulated", "learners": 5, "speeds": "gamma", "spread": 0.5, **words}
    compressor = served.pop("compressor", "none")
    length = {"steps": 40, **train}
    return Recipe(
        train=TrainConfig(32, 4, seed=1, **length),
        data=DataConfig(hold_out=0.1),
        solver=SolverConfig(base_lr=0.05, momentum=0.5, weight_decay=1e-4),
        checkpoint=CheckpointConfig(every=7, keep_last=0),
        run=RunConfig(folder=str(folder), tensorboard=False),
        exchange=ExchangeConfig(compressor=compressor),
        synchrony=SynchronyConfig(**served),
    )


def train(folder: Path, words: dict[str, Any], resume: Path | None = None, **more: Any) -> Result:
    made = recipe(folder, words, **more)
    return firecaffe.train(made, network, data(300, 0), data(100, 1), resume=resume)


@pytest.mark.parametrize("name", MODES)
def test_it_learns(name: str, tmp_path: Path) -> None:
    """The loss falls, from guessing's (1.39) to that of a network that tells most points apart."""
    result = train(tmp_path / "run", MODES[name])
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 1.3
    assert sum(losses[10:20]) / 10 < 1.0
    assert sum(losses[-10:]) / 10 < 0.75  # BatchNorm over four samples is noise
    assert result.top1 > 0.93
    row = json.loads((tmp_path / "run" / "result.json").read_text())["synchrony"]
    # Of 270 samples: 68 leaves in the 9 steps of an epoch; 40 steps are four epochs and 4 steps.
    warm = MODES[name].get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 4 * 68 + 4 * 8 - 8 * warm
    assert (row["dropped"] > 0, row["again"] > 0) == (name == "backup", name == "again")
    late = {"backup": 0, "again": 0, "softsync": 5 / 3, "stale": 2.7}.get(name, 4)
    assert row["mean_staleness"] == pytest.approx(late, abs=0.5)


@pytest.mark.parametrize("name", MODES)
def test_a_resumed_run_ends_in_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", MODES[name])
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000021"
    again = train(tmp_path / "again", MODES[name], checkpoint)
    assert again.state_sha256 == whole.state_sha256
    log = (tmp_path / "whole" / "events.jsonl").read_bytes()
    assert (tmp_path / "again" / "events.jsonl").read_bytes() == log
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "again")]
    assert results[0]["synchrony"] == results[1]["synchrony"]


def test_warm_steps_are_those_of_every_step(tmp_path: Path) -> None:
    words = {"mode": "asynchronous", "warm_steps": 7}
    served, plain = tmp_path / "served", tmp_path / "plain"
    train(served, words, steps=8)
    synchronous = dataclasses.replace(recipe(plain, words, steps=8), synchrony=SynchronyConfig())
    firecaffe.train(synchronous, network, data(300, 0), data(100, 1))
    digests = []
    for folder in (served, plain):
        rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        digests.append([row["loss"] for row in rows if row["kind"] == "train"])
    assert digests[0][:7] == digests[1][:7]
    assert digests[0][7] != digests[1][7]


def test_another_length_is_another_training(tmp_path: Path) -> None:
    words = MODES["asynchronous"]
    train(tmp_path / "run", words, steps=14)
    with pytest.raises(firecaffe.FirecaffeError, match=r"train\.steps is 20 .*, 14 in the check"):
        train(tmp_path / "longer", words, tmp_path / "run", steps=20)


def test_events_that_are_gone_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "run", MODES["stale"], steps=14)
    (tmp_path / "run" / "events.jsonl").unlink()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000007"
    again = train(tmp_path / "again", MODES["stale"], checkpoint, steps=14)
    assert "cannot be replayed" in capsys.readouterr().out
    assert again.state_sha256 == whole.state_sha256


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r"synchrony\.mode is 'later'; it must be one of every_step, backup", {"mode": "later"}),
        (r"synchrony\.in_flight is 5; it must be 1 to 4", {"clock": "real", "in_flight": 5}),
        (
            r"backup_workers is 1; it must be less than 1, the learners of 1 worker,",
            {"mode": "backup", "clock": "real"},
        ),
        (
            r"gradients_per_update is 3; it must be at most 2, .* with synchrony\.in_flight 2",
            {"gradients_per_update": 3, "clock": "real", "in_flight": 2},
        ),
        (r"synchrony\.learners is 0", {"learners": 0}),
        (
            r"backup_workers is 5; it must be less than synchrony\.learners, 5",
            {"mode": "backup", "backup_workers": 5},
        ),
        (
            r"backup_workers is 8 of 8 micro-batches",
            {"mode": "backup", "backup_workers": 8, "learners": 9},
        ),
        (r"gradients_per_update is 6; it must be at most", {"gradients_per_update": 6}),
        (r"gradients_per_update is 9 of 8", {"gradients_per_update": 9, "learners": 9}),
        (r"warm_steps is 40 of train\.steps 40", {"warm_steps": 40}),
        (r"speeds_from x\.jsonl: No such", {"speeds": "measured", "speeds_from": "x.jsonl"}),
        (r"synchrony\.spread is 0", {"spread": 0.0}),
        (r"synchrony\.slow_factor is 0\.5", {"slow_factor": 0.5}),
        (r"synchrony\.compensate is 'gaps'", {"compensate": "gaps"}),
    ],
)
def test_words_that_cannot_be(line: str, words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line) as caught:
        train(tmp_path / "run", {"mode": "asynchronous", **words})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("words", [{"server": "sharded"}, {"lock": "none"}])
def test_no_worker_comes_to_weights_that_rank_0_does_not_have(
    words: dict[str, Any], tmp_path: Path
) -> None:
    made = recipe(tmp_path / "run", {"mode": "asynchronous", "clock": "real", **words})
    with pytest.raises(RecipeError, match="come to runs whose weights are at rank 0"):
        join_run(check_recipe(made), "localhost:1")
