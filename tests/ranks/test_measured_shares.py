"""Shares that change while a training goes on change no bit, however workers' speeds change."""

import dataclasses
import os
import random
import time
from pathlib import Path
from unittest.mock import patch

import pytest

import firecaffe
from firecaffe import ExchangeConfig, Recipe, RunConfig, SynchronyConfig
from firecaffe.cluster import agree
from firecaffe.data import Batch
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import read_rows
from firecaffe.training import rebalance
from firecaffe.training.times import Timings
from tests.ranks.networks import Everything, small_data
from tests.ranks.test_invariance import RECIPE as INVARIANT
from tests.world import Ranks

# 12 micro-batches of 4 over 100 samples: BatchNorm, dropout, clipping, a moving average, and an
# epoch's last step in which most micro-batches are empty.
RECIPE = dataclasses.replace(
    INVARIANT,
    train=dataclasses.replace(
        INVARIANT.train, global_batch_size=48, steps=9, ema_decay=0.9, ema_warmup=True
    ),
    synchrony=SynchronyConfig(shares="measured", shares_every=1),
)

SEQUENCES = 8


class AnySpeed:
    """Stands in for the measurement: a rank's seconds for a micro-batch, anew at each step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, timings: Timings) -> float:
        place = f"{self.seed}, {os.environ.get('RANK')}, {timings.step}"
        return random.Random(place).choice([1.0, 1.0, 2.0, 3.5, 9.0])


def fit(recipe: Recipe, folder: str, seed: int, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    train, test = small_data(100), small_data(30, 1)
    with patch.object(rebalance, "own_seconds", AnySpeed(seed)):
        return firecaffe.train(recipe, Everything, train, test, resume=resume)


def fit_hasty(recipe: Recipe, folder: str, seeds: list[int]) -> list[str]:
    """The same with looks at the watch that hardly wait."""
    with patch.object(agree, "LOOK_S", 0.001):
        return fit_each(recipe, folder, seeds)


def fit_each(recipe: Recipe, folder: str, seeds: list[int]) -> list[str]:
    """The states that trainings end with, each with speeds of its own."""
    return [fit(recipe, f"{folder}/{seed}", seed).state_sha256 for seed in seeds]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state that one worker ends with, with equal shares."""
    recipe = dataclasses.replace(RECIPE, synchrony=SynchronyConfig())
    folder = tmp_path_factory.mktemp("alone") / "run"
    (state,) = ranks.shared(1, fit_each, recipe, str(folder), [0])[0]
    return str(state)


@pytest.mark.parametrize("world_size", [1, 3])
def test_speeds_that_change_change_no_bit(
    ranks: Ranks, alone: str, world_size: int, tmp_path: Path
) -> None:
    seeds = list(range(world_size - 1, SEQUENCES, 4))
    for states in ranks.shared(world_size, fit_each, RECIPE, str(tmp_path), seeds):
        assert states == [alone] * len(seeds)
    found = [read_run_file(tmp_path / str(seed), "result.json") for seed in seeds]
    if world_size == 1:
        assert all(each["balance"] is None and each["route"] == "tree" for each in found)
        return
    assert {each["route"] for each in found} == {"fold"}
    for each in found:
        changes = each["balance"]["changes"]
        counts = [change["micro_batches_by_rank"] for change in changes]
        assert len({tuple(count) for count in counts}) > 1
        assert all(sum(count) == 12 and min(count) >= 1 for count in counts)
        assert each["balance"]["micro_batches_by_rank"] == counts[-1]


@pytest.mark.parametrize(("codec", "level"), [("top_k", 1), ("power_sgd", 0)])
def test_what_a_codec_keeps_back_goes_along(
    ranks: Ranks, codec: str, level: int, tmp_path: Path
) -> None:
    """To the worker that has its micro-batches from then on."""
    exchange = ExchangeConfig(bucket_bytes=500, compressor=codec, compressor_level=level)
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    equal = dataclasses.replace(recipe, synchrony=SynchronyConfig())
    (alone,) = ranks.shared(1, fit_each, equal, str(tmp_path / "alone"), [0])[0]
    for world_size in (2, 3):
        folder = tmp_path / str(world_size)
        for states in ranks.shared(world_size, fit_hasty, recipe, str(folder), [world_size]):
            assert states == [alone]
        found = read_run_file(folder / str(world_size), "result.json")["balance"]["changes"]
        assert len(found) > 1
        assert all(n % (1 << level) == 0 for each in found for n in each["micro_batches_by_rank"])


def test_a_worker_that_takes_longer_gets_less(ranks: Ranks, tmp_path: Path) -> None:
    """By the clock, and data time counts: for each of its samples one rank computes for long."""
    synchrony = SynchronyConfig(shares="measured", shares_every=4)
    recipe = dataclasses.replace(RECIPE, synchrony=synchrony)
    ranks.shared(2, fit_with_slow_data, recipe, str(tmp_path / "run"), 1)
    counts = read_run_file(tmp_path / "run", "result.json")["balance"]["micro_batches_by_rank"]
    assert counts[0] > counts[1]
    last = [
        list(read_rows(tmp_path / f"run/timings/rank-{rank}.jsonl", dict))[-1] for rank in (0, 1)
    ]
    assert [row["micro_batches"] for row in last] == counts


SPUN_S = 0.05


def fit_with_slow_data(recipe: Recipe, folder: str, slow: int) -> None:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))

    def take(batches: BatchesAhead, step: int, leaf: int) -> Batch:
        until = time.thread_time() + SPUN_S
        while os.environ["RANK"] == str(slow) and time.thread_time() < until:
            pass
        return take_now(batches, step, leaf)

    take_now = BatchesAhead.train_batch
    with patch.object(BatchesAhead, "train_batch", take):
        firecaffe.train(recipe, Everything, small_data(100), small_data(30, 1))
