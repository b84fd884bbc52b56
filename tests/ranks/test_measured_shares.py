"""Shares that change while a training goes on change no bit, however workers' speeds change.

Other compositions are in the matrix (`test_matrix.py`).
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from firecaffe import ExchangeConfig, Recipe, Result, SynchronyConfig
from firecaffe.cluster import agree
from firecaffe.data import Batch
from firecaffe.data.batches import PrefetchedBatches
from firecaffe.runs.rank_times import explain
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import read_rows
from firecaffe.training.modes import every_step
from tests.kit.worlds import EVERYTHING, Trained, Training, changed
from tests.ranks.matrix import FIRST, AnySpeed, Net, full, recipe_of
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


@dataclass(frozen=True)
class AtAnySpeed(Training):
    """With speeds that change, and looks at the watch that may hardly wait."""

    seed: int = 0
    look_s: float = agree.POLL_S

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        with (
            patch.object(every_step, "own_seconds", AnySpeed(self.seed)),
            patch.object(agree, "POLL_S", self.look_s),
        ):
            return super().__call__(recipe, folder, resume)


def test_one_worker_has_no_shares_to_measure(trained: Trained) -> None:
    record = read_run_file(trained(1, RECIPE, AtAnySpeed()).folder, "result.json")
    assert (record["balance"], record["route"]) == (None, "tree")


@pytest.mark.parametrize(("codec", "level"), [("none", 0), ("top_k", 1)])
def test_the_record_has_the_shares(trained: Trained, codec: str, level: int) -> None:
    """What a codec keeps back goes along, to the worker that has its micro-batches from then on."""
    exchange = ExchangeConfig(bucket_bytes=500, compressor=codec, compressor_level=level)
    recipe = changed(RECIPE, exchange=exchange)
    found = trained(3, recipe, AtAnySpeed(seed=2, look_s=0.001))
    assert found.state_sha256 == trained(1, changed(recipe, synchrony=EQUAL)).state_sha256
    record = read_run_file(found.folder, "result.json")
    counts = [change["micro_batches_by_rank"] for change in record["balance"]["changes"]]
    assert len({tuple(count) for count in counts}) > 1
    assert all(sum(count) == 12 and min(count) >= 1 for count in counts)
    assert all(number % (1 << level) == 0 for count in counts for number in count)
    assert record["balance"]["micro_batches_by_rank"] == counts[-1]


def test_rows_have_shares(trained: Trained) -> None:
    """Rows of two ranks, each with a model that is split."""
    recipe = recipe_of(full({"holding": "trick", "shares": "measured"}), FIRST)
    found = trained(4, recipe, AtAnySpeed(Net, validation=20, seed=1))
    record = read_run_file(found.folder, "result.json")
    assert record["route"] == "fold"
    counts = [change["micro_batches_by_rank"] for change in record["balance"]["changes"]]
    assert any(count[0] != count[2] for count in counts)
    assert all(count[0] == count[1] and count[2] == count[3] for count in counts)
    assert [sum(count) for count in counts] == [8] * len(counts)
    assert record["balance"]["micro_batches_by_rank"] == counts[-1]
    shares = explain(found.folder).shares
    assert shares is not None
    assert (shares.who, shares.micro_batches) == (
        "rows",
        [2 * number for number in counts[-1][::2]],
    )


SPUN_S = 0.05


def fit_with_slow_data(recipe: Recipe, folder: Path) -> None:
    """Rank 1 computes for long for each of its samples."""

    def take(batches: PrefetchedBatches, step: int, leaf: int) -> Batch:
        until = time.thread_time() + SPUN_S
        while os.environ["RANK"] == "1" and time.thread_time() < until:
            pass
        return take_now(batches, step, leaf)

    take_now = PrefetchedBatches.train_batch
    with patch.object(PrefetchedBatches, "train_batch", take):
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
