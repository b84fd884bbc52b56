"""What trainings measure: shares by speed and the gradient noise scale, which change no bit however
workers' speeds change; and steps timed beside an exchange that goes on for as long as any computes.

Other compositions of shares are in the matrix (`test_matrix.py`).
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from firecaffe import ExchangeConfig, Recipe, Result, SynchronyConfig
from firecaffe.api import cluster_check
from firecaffe.cluster import agree
from firecaffe.cluster.world import join
from firecaffe.errors import RecipeError
from firecaffe.measure import step_times as measured_step
from firecaffe.measure.step_times import StepTimes, time_steps_beside_exchange
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.rank_times import explain
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import read_rows
from firecaffe.training import outcome
from firecaffe.training.modes import every_step
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.kit.training import ALONE
from tests.kit.worlds import EVERYTHING, Trained, Training, changed, checkpoint_of, end
from tests.ranks.killed import before_batches
from tests.ranks.matrix import FIRST, AnySpeed, Net, full, recipe_of
from tests.ranks.test_invariance import RECIPE as INVARIANT
from tests.world import Ranks

# --- shares by speed ------------------------------------------------------------------------------

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


SPUN_S = 0.02


def fit_with_slow_data(recipe: Recipe, folder: Path) -> None:
    """Rank 1 computes for long for each of its samples."""

    def spin(*_: int) -> None:
        until = time.thread_time() + SPUN_S
        while os.environ["RANK"] == "1" and time.thread_time() < until:
            pass

    with before_batches(spin):
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


# --- the noise scale ------------------------------------------------------------------------------

# Of the 5 steps of an epoch, the last one is short.
LONGER = changed(INVARIANT, train={"steps": 14}, checkpoint={"every": 7})
STEPS = [step for step in range(2, 15) if step % 5]


@dataclass(frozen=True)
class Measured(Training):
    """A training that measures each step that it can."""

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        with patch.object(outcome, "EVERY", 1):
            return super().__call__(recipe, folder, resume)


MEASURED = Measured()


def scale_of(trained: Trained, workers: int, recipe: Recipe) -> dict[str, Any] | None:
    return trained(workers, recipe, MEASURED).noise_scale


def test_workers_change_no_bit_of_the_noise_scale(trained: Trained) -> None:
    """With nodes of the tree apart and not, with other ranks later on, and with a loss scale."""
    alone = trained(1, LONGER, MEASURED)
    assert end(alone) == end(trained(1, LONGER))
    assert alone.noise_scale is not None
    assert alone.noise_scale["steps"] == STEPS
    assert alone.noise_scale["low"] > 0
    two = trained(2, LONGER, MEASURED)
    goes_on = trained(3, LONGER, MEASURED, checkpoint_of(two, 7))
    assert two.noise_scale == goes_on.noise_scale == alone.noise_scale
    assert read_run_file(alone.folder, "result.json")["noise_scale"] == alone.noise_scale
    last = alone.history[STEPS[-1] - 1]
    assert last["noise_scale_low"] == alone.noise_scale["low"]
    # Gradients were clipped above. Their norms are those before.
    for sections in ({"solver": {"clip_gradients": 1e9}}, {"train": {"autocast": "float16"}}):
        recipe = changed(INVARIANT, **sections)
        assert scale_of(trained, 2, recipe) == scale_of(trained, 1, recipe) is not None


def test_none_where_it_cannot_be_had(trained: Trained) -> None:
    sections: list[dict[str, dict[str, Any]]] = [
        {"train": {"micro_batch_size": 24}},
        {"exchange": {"compressor": "bfloat16"}},
        {"exchange": {"update_at": "shards"}},
        {"synchrony": {"mode": "local", "replicas": 2, "local_steps": 2, "warm_steps": 5}},
        {"synchrony": {"mode": "backup", "clock": "simulated", "learners": 3, "warm_steps": 5}},
        {"parallel": {"split": {"head": "neurons"}, "parts": 2}},
        {"prune": {"keep": {"*": 0.5}}},
        {"train": {"steps": 4}},
    ]
    assert scale_of(trained, 1, INVARIANT) is not None
    for section in sections:
        assert scale_of(trained, 1, changed(INVARIANT, **section)) is None, section


# --- steps beside an exchange ---------------------------------------------------------------------

WAIT_S = 300.0


def sums_beside(failing_rank: int | None, in_memory: bool) -> tuple[str, int]:
    """Rank r computes until it has seen 2 (r + 1) sums; what came of it, and all sums."""
    summed = threading.Condition()
    sums = 0
    all_reduce = Exchange.all_reduce

    def counted(self: Exchange, vector: torch.Tensor, lane: int = 0) -> None:
        nonlocal sums
        all_reduce(self, vector, lane)
        assert not vector[1:].any()
        with summed:
            sums += 1
            summed.notify()

    def compute(*_: Any) -> str:
        with summed:
            assert summed.wait_for(lambda: sums >= 2 * (world.rank + 1), WAIT_S)
        if world.rank == failing_rank:
            raise RecipeError("this rank cannot")
        return "timed"

    with (
        patch.object(Exchange, "all_reduce", counted),
        patch.object(measured_step, "time_steps", compute),
        join("cpu") as world,
    ):
        local = meet_local_ranks(world, WAIT_S) if in_memory else None
        assert (local is not None) == in_memory
        try:
            said: Any = time_steps_beside_exchange(check_recipe(Recipe()), world, local, 8, 0.0, 1)
        except RecipeError as error:
            said = error
        finally:
            if local is not None:
                local.close()
    return str(said), sums


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_go_on_until_the_last_rank_has_computed(
    ranks: Ranks, world_size: int, in_memory: bool
) -> None:
    found = ranks.shared(world_size, sums_beside, None, in_memory)
    (sums,) = {each for _, each in found}
    assert sums > 2 * world_size
    assert {said for said, _ in found} == {"timed"}


def test_a_rank_that_cannot_compute_holds_nobody_up(ranks: Ranks) -> None:
    found = ranks.run(3, sums_beside, 1, False)
    assert [said for said, _ in found] == ["timed", "this rank cannot", "timed"]
    assert len({each for _, each in found}) == 1


@pytest.mark.parametrize(("beside_s", "slowdown"), [(0.5, 0.25), (0.3, 0.0)])
def test_the_slowdown_is_of_the_size_that_is_trained(
    monkeypatch: pytest.MonkeyPatch, beside_s: float, slowdown: float
) -> None:
    recipe = Recipe()
    size = recipe.train.micro_batch_size

    def timed(micro_batch_size: int, compute_s: float) -> StepTimes:
        return StepTimes(micro_batch_size, 1, (9.0, compute_s, 0.0), (0.0,), (0.0,), 0)

    rows = [[timed(size // 2, 7.0), timed(size, compute_s)] for compute_s in (0.1, 0.4, 2.0)]
    name = "time_steps_beside_exchange"
    monkeypatch.setattr(cluster_check, name, lambda *_: timed(size, beside_s))
    slower = cluster_check._slowdown(ALONE, check_recipe(recipe), None, rows)
    assert slower == pytest.approx(slowdown)
