"""Shares that change while a training goes on change no bit, however workers' speeds change.

Other compositions are in the matrix (`test_matrix.py`).
"""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from firecaffe import ExchangeConfig, ParallelConfig, Recipe, Result, SynchronyConfig
from firecaffe.cluster import agree
from firecaffe.data import Batch
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.runs.rank_times import explain
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import read_rows
from firecaffe.training import rebalance
from firecaffe.training.times import Timings
from tests.kit.worlds import EVERYTHING, Trained, Training, changed
from tests.ranks import test_layouts, test_stage_layouts
from tests.ranks.test_invariance import RECIPE as INVARIANT
from tests.world import Ranks

# 12 micro-batches of 4 over 100 samples: BatchNorm, dropout, clipping, a moving average, and an
# epoch's last step in which most micro-batches are empty.
RECIPE = changed(
    INVARIANT,
    train={"global_batch_size": 48, "steps": 9, "ema_decay": 0.9, "ema_warmup": True},
    synchrony=SynchronyConfig(shares="measured", shares_every=1),
)
EQUAL = SynchronyConfig()


class AnySpeed:
    """Stands in for the measurement: a rank's seconds for a micro-batch, anew at each step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, timings: Timings) -> float:
        place = f"{self.seed}, {os.environ.get('RANK')}, {timings.step}"
        return random.Random(place).choice([1.0, 1.0, 2.0, 3.5, 9.0])


@dataclass(frozen=True)
class AtAnySpeed(Training):
    """With speeds that change, and looks at the watch that may hardly wait."""

    seed: int = 0
    look_s: float = agree.LOOK_S

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        with (
            patch.object(rebalance, "own_seconds", AnySpeed(self.seed)),
            patch.object(agree, "LOOK_S", self.look_s),
        ):
            return super().__call__(recipe, folder, resume)


def test_one_worker_has_no_shares_to_measure(trained: Trained) -> None:
    found = trained(1, RECIPE, AtAnySpeed())
    record = read_run_file(found.folder, "result.json")
    assert (record["balance"], record["route"]) == (None, "tree")
    assert found.state_sha256 == trained(1, changed(RECIPE, synchrony=EQUAL)).state_sha256


@pytest.mark.parametrize("seed", [2, 6])
def test_speeds_that_change_change_no_bit(trained: Trained, seed: int) -> None:
    found = trained(3, RECIPE, AtAnySpeed(seed=seed))
    assert found.state_sha256 == trained(1, changed(RECIPE, synchrony=EQUAL)).state_sha256
    record = read_run_file(found.folder, "result.json")
    counts = [each["micro_batches_by_rank"] for each in record["balance"]["changes"]]
    assert record["route"] == "fold"
    assert len({tuple(count) for count in counts}) > 1
    assert all(sum(count) == 12 and min(count) >= 1 for count in counts)
    assert record["balance"]["micro_batches_by_rank"] == counts[-1]


@pytest.mark.parametrize(("codec", "level"), [("top_k", 1), ("power_sgd", 0)])
def test_what_a_codec_keeps_back_goes_along(trained: Trained, codec: str, level: int) -> None:
    """To the worker that has its micro-batches from then on."""
    exchange = ExchangeConfig(bucket_bytes=500, compressor=codec, compressor_level=level)
    recipe = changed(RECIPE, exchange=exchange)
    found = trained(3, recipe, AtAnySpeed(seed=3, look_s=0.001))
    assert found.state_sha256 == trained(1, changed(recipe, synchrony=EQUAL)).state_sha256
    changes = read_run_file(found.folder, "result.json")["balance"]["changes"]
    assert len(changes) > 1
    assert all(n % (1 << level) == 0 for each in changes for n in each["micro_batches_by_rank"])


ROWS: dict[str, tuple[Any, Recipe, ParallelConfig]] = {
    "trick": (
        test_layouts.Net,
        test_layouts.RECIPE,
        test_layouts.LAYOUTS["trick 2 x 2"],
    ),
    "stages": (
        test_stage_layouts.Net,
        test_stage_layouts.RECIPE,
        ParallelConfig(2, stages=["middle.3"]),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_speeds_of_rows_that_change_change_no_bit(trained: Trained, name: str) -> None:
    """Rows of ranks, each with a model that is split, are given unequal shares."""
    network, recipe, parallel = ROWS[name]
    recipe = changed(recipe, synchrony=RECIPE.synchrony, parallel=parallel)
    training = AtAnySpeed(network, validation=20, seed=1)
    found = trained(4, recipe, training)
    alone = trained(1, changed(recipe, parallel=parallel.over(1, 1)), training)
    assert found.state_sha256 == alone.state_sha256
    record = read_run_file(found.folder, "result.json")
    assert record["route"] == "fold"
    counts = [each["micro_batches_by_rank"] for each in record["balance"]["changes"]]
    assert any(count[0] != count[2] for count in counts)
    assert all(count[0] == count[1] and count[2] == count[3] for count in counts)
    of_rank = 2 if name == "trick" else 1
    assert [(count[0] + count[2]) * of_rank for count in counts] == [8] * len(counts)
    last = record["balance"]["micro_batches_by_rank"]
    assert last == counts[-1]
    shares = explain(found.folder).shares
    assert shares is not None
    assert (shares.who, shares.micro_batches) == ("rows", [each * of_rank for each in last[::2]])


SPUN_S = 0.05


def fit_with_slow_data(recipe: Recipe, folder: Path) -> None:
    """Rank 1 computes for long for each of its samples."""

    def take(batches: BatchesAhead, step: int, leaf: int) -> Batch:
        until = time.thread_time() + SPUN_S
        while os.environ["RANK"] == "1" and time.thread_time() < until:
            pass
        return take_now(batches, step, leaf)

    take_now = BatchesAhead.train_batch
    with patch.object(BatchesAhead, "train_batch", take):
        EVERYTHING(recipe, folder)


def test_a_worker_that_takes_longer_gets_less(ranks: Ranks, tmp_path: Path) -> None:
    """By the clock, and data time counts."""
    recipe = changed(RECIPE, synchrony={"shares_every": 4})
    run = tmp_path / "run"
    ranks.shared(2, fit_with_slow_data, recipe, run)
    counts = read_run_file(run, "result.json")["balance"]["micro_batches_by_rank"]
    assert counts[0] > counts[1]
    rows = [list(read_rows(run / f"timings/rank-{rank}.jsonl", dict)) for rank in (0, 1)]
    assert [each[-1]["micro_batches"] for each in rows] == counts
