"""Trainings with a server whose workers are ranks, and what one worker gets from their logs."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import firecaffe
from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    Recipe,
    Result,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.cluster.world import World
from firecaffe.data import Batch, Batches
from firecaffe.errors import FirecaffeError
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.synchrony.config import SERVED
from firecaffe.synchrony.events import Event, from_row
from firecaffe.training.parts import Parts
from firecaffe.training.verification import Replayed, replay
from tests.ranks.networks import Everything, small_data
from tests.unit.training.served.test_trainings import data, network

MODES: dict[str, dict[str, Any]] = {
    "backup": {"mode": "backup", "backup_workers": 1},
    "again": {"mode": "backup", "backup_workers": 1, "dropped": "again"},
    "stale": {"mode": "stale", "max_staleness": 2, "warm_steps": 2},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse"},
    "softsync": {"mode": "asynchronous", "gradients_per_update": 2, "compensate": "delay"},
    "nesterov": {"mode": "asynchronous", "server_momentum": "delayed_nesterov", "in_flight": 2},
    "encoded": {"mode": "backup", "backup_workers": 1, "compressor": "int8"},
}
assert {words["mode"] for words in MODES.values()} == set(SERVED)

LOCKLESS: dict[str, Any] = {"mode": "asynchronous", "lock": "none"}

ALONE = World(0, 1, torch.device("cpu"))
SAMPLES = 100


def sharded(name: str) -> dict[str, Any]:
    """A mode with a server in parts."""
    return {**MODES[name], "server": "sharded"}


def recipe(folder: Path, words: dict[str, Any], steps: int = 8, eval_every: int = 5) -> Recipe:
    served = dict(words)
    exchange = ExchangeConfig(compressor=served.pop("compressor", "none"))
    return Recipe(
        train=TrainConfig(24, 4, steps=steps, seed=3, eval_batch_size=7, eval_every=eval_every),
        solver=SolverConfig(base_lr=0.05, momentum=0.5, weight_decay=1e-4),
        checkpoint=CheckpointConfig(every=3, keep_last=0),
        run=RunConfig(folder=str(folder), tensorboard=False),
        exchange=exchange,
        synchrony=SynchronyConfig(**served),
    )


def fit(made: Recipe, resume: str | None = None) -> Result:
    sets = small_data(SAMPLES), small_data(30, 1)
    return firecaffe.train(made, Everything, *sets, resume=resume, validation_set=small_data(20, 2))


def fit_and_digest(made: Recipe, resume: str | None = None) -> tuple[Result, list[float]]:
    """What `train` returns on this rank, and its network's outputs."""
    result = fit(made, resume)
    with torch.no_grad():
        return result, result.model(small_data(5, 3).inputs).flatten().tolist()


def fit_corners(made: Recipe) -> Result:
    """Four classes of points around corners, and a network that can tell them apart."""
    return firecaffe.train(made, network, data(300, 0), data(100, 1))


def fit_until_lost(made: Recipe, number: int) -> Result:
    """The last rank gets a signal when it takes its first micro-batch of a step. Before the first
    step four are taken: one to try the outputs, two for the look, one for the probe.
    """
    taken = 0

    def take(batches: Batches, step: int, leaf: int) -> Batch:
        nonlocal taken
        taken += 1
        if taken == 5 and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            os.kill(os.getpid(), number)
        return take_now(batches, step, leaf)

    take_now = Batches.train_batch
    with patch.object(Batches, "train_batch", take):
        return fit(made)


def end_of(made: Recipe, number: int = 0) -> tuple[str, bool, str]:
    """What `train` raises: its kind, whether it goes along with another rank's, and its words."""
    try:
        fit_until_lost(made, number)
    except FirecaffeError as error:
        return type(error).__name__, error.goes_along, str(error)
    return "", False, ""


def given() -> Parts:
    return Parts(
        Everything,
        train=small_data(SAMPLES),
        test=small_data(30, 1),
        validation=small_data(20, 2),
    )


def replayed(folder: Path) -> Replayed:
    return replay(folder, recipe_of(folder), ALONE, None, given())


def events_of(run: Path) -> list[Event]:
    _, *lines = (run / "events.jsonl").read_text().splitlines()
    return [from_row(json.loads(line)) for line in lines]


def synchrony(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text())["synchrony"])
