"""Trainings with a server whose workers are ranks, and what one worker gets from their logs."""

import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    Recipe,
    Result,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.synchrony.config import SERVED
from firecaffe.synchrony.events import Event, from_row
from firecaffe.training.checkpoint import checkpoint_name, load_checkpoint
from firecaffe.training.given_parts import Parts
from firecaffe.training.verification import Replayed, replay
from tests.kit.training import ALONE
from tests.kit.worlds import Training, changed
from tests.ranks.killed import killed
from tests.ranks.networks import Everything, small_data

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

SAMPLES = 100


def sharded(name: str) -> dict[str, Any]:
    return {**MODES[name], "server": "sharded"}


def recipe(words: dict[str, Any], **sections: Any) -> Recipe:
    served = dict(words)
    made = Recipe(
        train=TrainConfig(24, 4, steps=8, seed=3, eval_batch_size=7, eval_every=5),
        solver=SolverConfig(base_lr=0.05, momentum=0.5, weight_decay=1e-4),
        checkpoint=CheckpointConfig(every=3, keep_last=0),
        exchange=ExchangeConfig(compressor=served.pop("compressor", "none")),
        synchrony=SynchronyConfig(**served),
    )
    return changed(made, **sections)


TRAINING = Training(samples=SAMPLES, validation=20)


def fit_until_lost(made: Recipe, folder: Path, number: int) -> Result:
    """The last rank gets a signal when it takes its first micro-batch of a step. Before the first
    step four are taken: one to try the outputs, two for the look, one for the probe.
    """
    taken = count(1)
    with killed(int(os.environ["WORLD_SIZE"]) - 1, lambda _: next(taken) == 5, number):
        return TRAINING(made, folder)


def given(network: Callable[[], nn.Module] = Everything) -> Parts:
    train, test, validation = small_data(SAMPLES), small_data(30, 1), small_data(20, 2)
    return Parts(network, train=train, test=test, validation=validation)


def replayed(
    folder: Path, to: Path | None = None, network: Callable[[], nn.Module] = Everything
) -> Replayed:
    return replay(folder, recipe_of_run(folder), ALONE, to, given(network))


def check_replay(result: Result, network: Callable[[], nn.Module] = Everything) -> dict[str, Any]:
    """That one worker gets a run's bits from its log; what the record says of synchrony.

    The checkpoint that it keeps has the run's own numbers: of its clock, policy and log.
    """
    with TemporaryDirectory() as name:
        to = Path(name) / "replayed"
        found = replayed(result.folder, to, network)
        last = checkpoint_name(found.computed.step)
        kept = load_checkpoint(to / "checkpoints" / last)
    assert found.is_same
    assert found.computed.state == result.state_sha256
    own = load_checkpoint(result.folder / "checkpoints" / last)
    assert kept.numbers["synchrony"] == own.numbers["synchrony"]
    return synchrony(result.folder)


def computed(made: Recipe) -> int:
    """Micro-batches that come by events: an epoch is 25 in 5 steps, and warm steps have theirs."""
    return 25 + 18 - 6 * made.synchrony.warm_steps


def events_of(run: Path) -> list[Event]:
    _, *lines = (run / "events.jsonl").read_text().splitlines()
    return [from_row(json.loads(line)) for line in lines]


def synchrony(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text())["synchrony"])
