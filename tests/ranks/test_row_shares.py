"""Rows of ranks, each with a model that is split, are given unequal shares: no bit changes.

Other compositions are in the matrix (`test_matrix.py`).
"""

import dataclasses
from pathlib import Path
from unittest.mock import patch

import pytest

import firecaffe
from firecaffe import ParallelConfig, RunConfig, SynchronyConfig
from firecaffe.runs.rank_times import explain
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training import rebalance
from tests.ranks import test_layouts, test_stage_layouts
from tests.ranks.networks import small_data
from tests.ranks.test_measured_shares import AnySpeed
from tests.world import Ranks

MEASURED = SynchronyConfig(shares="measured", shares_every=1)

SPLIT = dataclasses.replace(test_layouts.RECIPE, synchrony=MEASURED)
STAGES = dataclasses.replace(test_stage_layouts.RECIPE, synchrony=MEASURED)

CASES = {
    "trick": (test_layouts.Net, SPLIT, test_layouts.LAYOUTS["trick 2 x 2"]),
    "stages, 1f1b": (
        test_stage_layouts.Net,
        STAGES,
        ParallelConfig(2, stages=["middle.3"]),
    ),
}


def fit(name: str, parallel: ParallelConfig, folder: str, seed: int | None = None) -> str:
    network, words, _ = CASES[name]
    run = RunConfig(folder=folder, tensorboard=False)
    recipe = dataclasses.replace(words, parallel=parallel, run=run)
    sets = small_data(100), small_data(30, 1)
    with patch.object(rebalance, "own_seconds", AnySpeed(seed or 0)):
        return firecaffe.train(
            recipe, network, *sets, validation_set=small_data(20, 2)
        ).state_sha256


@pytest.mark.parametrize(
    ("name", "seeds"),
    [("trick", (1,)), ("stages, 1f1b", (1,))],
)
def test_speeds_of_rows_that_change_change_no_bit(
    ranks: Ranks, name: str, seeds: tuple[int, ...], tmp_path: Path
) -> None:
    parallel = CASES[name][2]
    [expected] = ranks.shared(1, fit, name, parallel.over(1, 1), str(tmp_path / "alone"))
    assert read_run_file(tmp_path / "alone", "result.json")["balance"] is None
    for seed in seeds:
        folder = tmp_path / str(seed)
        assert ranks.shared(4, fit, name, parallel, str(folder), seed) == [expected] * 4
        result = read_run_file(folder, "result.json")
        assert result["route"] == "fold"
        counts = [each["micro_batches_by_rank"] for each in result["balance"]["changes"]]
        assert any(count[0] != count[2] for count in counts)
        assert all(count[0] == count[1] and count[2] == count[3] for count in counts)
        of_row = [(count[0] + count[2]) * (2 if name == "trick" else 1) for count in counts]
        assert of_row == [8] * len(counts)
        last = result["balance"]["micro_batches_by_rank"]
        assert last == counts[-1]
        told = explain(folder).shares
        assert told is not None
        assert told.who == "rows"
        assert told.micro_batches == [each * (2 if name == "trick" else 1) for each in last[::2]]
