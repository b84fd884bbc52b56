"""Modes with a server on real workers: they learn, and one worker gets their bits from the log."""

import dataclasses
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
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
from firecaffe.recipe.of_run import recipe_of
from firecaffe.runs.explain import read_rows
from firecaffe.runs.explain_served import explain_served
from firecaffe.synchrony.config import SERVED
from firecaffe.synchrony.events import Event, Push, from_row
from firecaffe.training.parts import Parts
from firecaffe.training.replay import Replayed, replay
from firecaffe.training.served.parcel import ALIGNMENT
from firecaffe.training.verify import verify_run
from tests.ranks.networks import Everything, small_data
from tests.unit.training.served.test_trainings import data, network
from tests.world import Ranks

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

ALONE = World(0, 1, torch.device("cpu"))
SAMPLES = 100


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


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODES)
def test_a_replay_gives_the_same_bits(
    ranks: Ranks, name: str, world_size: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (result, outputs), *others = ranks.shared(world_size, fit_and_digest, recipe(run, MODES[name]))
    for other, its_outputs in others:
        assert dataclasses.asdict(other) == dataclasses.asdict(result)
        assert its_outputs == outputs
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256
    row = synchrony(run)
    learners = world_size * MODES[name].get("in_flight", 1)
    assert len(row["pulled_bytes_by_learner"]) == learners
    told = explain_served(run, read_rows(run, "rank-*.jsonl"))
    assert told is not None
    assert sum(each.micro_batches for each in told.ranks) == row["gradients"]
    first = verify_run(run, recipe_of(run), ALONE, 5, given())
    assert (first.losses, first.tensors, first.weights) == (5, [3], [3, 5])
    # An epoch is 25 micro-batches in 5 steps; warm steps have theirs.
    warm = 6 * MODES[name].get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 25 + 18 - warm


def pushed_bytes(run: Path) -> dict[int, float]:
    """By rank, of one push."""
    pushes = Counter(event.work.learner for event in events_of(run) if isinstance(event, Push))
    found = synchrony(run)["pushed_bytes_by_learner"]
    return {learner: found[str(learner)] / count for learner, count in pushes.items()}


def test_what_is_pushed_is_encoded(ranks: Ranks, tmp_path: Path) -> None:
    """In rows of 256 elements of 2 bytes; all else is the same."""
    plain, encoded = tmp_path / "plain", tmp_path / "encoded"
    ranks.shared(3, fit, recipe(plain, {"mode": "asynchronous"}))
    ranks.shared(3, fit, recipe(encoded, {"mode": "asynchronous", "compressor": "float16"}))
    sizes = [each.numel() for each in Everything().parameters() if each.requires_grad]
    more = sum(-(-size // 256) * 512 - -(-4 * size // ALIGNMENT) * ALIGNMENT for size in sizes)
    before, found = pushed_bytes(plain), pushed_bytes(encoded)
    assert found == {0: 0, **{rank: before[rank] + more for rank in (1, 2)}}


def fit_corners(made: Recipe) -> Result:
    """Four classes of points around corners, and a network that can tell them apart."""
    return firecaffe.train(made, network, data(300, 0), data(100, 1))


@pytest.mark.parametrize("name", MODES)
def test_it_learns(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """The loss falls from guessing's, 1.39."""
    made = recipe(tmp_path / "run", MODES[name], steps=50, eval_every=0)
    made = dataclasses.replace(made, checkpoint=CheckpointConfig())
    (result, *_) = ranks.shared(2, fit_corners, made)
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 0.95  # of five updates
    assert sum(losses[-10:]) / 10 < 0.75  # BatchNorm over four samples is noise
    assert result.top1 > 0.9


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize(("first", "second"), [(3, 2), (1, 3)])
def test_a_resume_on_other_workers_is_replayed(
    ranks: Ranks, name: str, first: int, second: int, tmp_path: Path
) -> None:
    words = MODES[name]
    if first == 1 and words.get("backup_workers", words.get("gradients_per_update", 1)) > 0:
        words = {**words, "in_flight": 2}
    start, run = tmp_path / "start", tmp_path / "run"
    ranks.shared(first, fit, recipe(start, words))
    checkpoint = start / "checkpoints" / "step-00000003"
    made = recipe(run, words)
    (result, *_) = ranks.shared(second, fit, made, str(checkpoint))
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256
    row = synchrony(run)
    assert row["lost_learners"] == first * words.get("in_flight", 1)
    # The resumed part counts on.
    warm = 6 * words.get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 25 + 18 - warm


def fit_until_lost(made: Recipe, number: int) -> Result:
    """The last rank gets a signal when it has taken its third micro-batch."""
    taken = 0

    def take(batches: Batches, step: int, leaf: int) -> Batch:
        nonlocal taken
        taken += 1
        if taken == 3 and int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"]):
            os.kill(os.getpid(), number)
        return take_now(batches, step, leaf)

    take_now = Batches.train_batch
    with patch.object(Batches, "train_batch", take):
        return fit(made)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("name", ["backup", "again", "stale", "nesterov", "encoded"])
def test_a_lost_worker_ends_nobody(
    ranks: Ranks, name: str, number: signal.Signals, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = {word: value for word, value in MODES[name].items() if word != "warm_steps"}
    made = recipe(run, words)
    made = dataclasses.replace(made, exchange=ExchangeConfig(silent_s=2.0))
    result, other, _ = ranks.run(3, fit_until_lost, made, number, lost={2})
    assert dataclasses.asdict(other) == dataclasses.asdict(result)
    row = synchrony(run)
    # A step with a backup waits for no frozen worker, so the training may end before it is found.
    fewest = 0 if words["mode"] == "backup" else words.get("in_flight", 1)
    assert fewest <= row["lost_learners"] <= words.get("in_flight", 1)
    # Each sample of the training came once.
    assert row["gradients"] + row["dropped"] == 25 + 18
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256


def test_rank_0_goes_on_alone(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = recipe(run, MODES["softsync"])
    result, _ = ranks.run(2, fit_until_lost, made, signal.SIGKILL, lost={1})
    row = synchrony(run)
    assert (row["lost_learners"], row["gradients"]) == (1, 25 + 18)
    found = replayed(run)
    assert found.is_same
    assert found.found.state == result.state_sha256


def end_of(made: Recipe, number: int = 0) -> tuple[str, bool, str]:
    """What `train` raises: its kind, whether it goes along with another rank's, and its words."""
    try:
        fit_until_lost(made, number)
    except FirecaffeError as error:
        return type(error).__name__, error.goes_along, str(error)
    return "", False, ""


def test_numbers_that_are_not_finite_end_all(ranks: Ranks, tmp_path: Path) -> None:
    made = recipe(tmp_path / "run", MODES["asynchronous"])
    made = dataclasses.replace(made, solver=SolverConfig(base_lr=1e30))
    (kind, goes_along, line), other = ranks.run(2, end_of, made)
    assert (kind, goes_along) == ("NotFiniteError", False)
    assert "gradients of 2 learners come late" in line
    assert other == (kind, True, line)


def end_of_rise(made: Recipe) -> tuple[str, bool, str]:
    with patch("firecaffe.training.rise.PATIENCE", 0):
        return end_of(made)


def test_a_loss_that_stays_above_its_start_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    made = recipe(tmp_path / "run", MODES["asynchronous"])
    (kind, goes_along, line), other = ranks.run(2, end_of_rise, made)
    assert (kind, goes_along) == ("DivergedError", False)
    assert "gradients of 2 learners come late" in line
    assert other == (kind, True, line)


def test_a_worker_that_is_asked_to_stop_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = recipe(run, MODES["nesterov"], steps=1000, eval_every=0)
    (kind, goes_along, line), other = ranks.run(2, end_of, made, signal.SIGTERM)
    assert (kind, goes_along) == ("PreemptedError", True)
    assert "another rank was asked to" in line
    assert other == (kind, False, line)
    assert replayed(run).is_same
