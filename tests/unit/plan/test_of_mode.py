"""A run's forecast in another mode than every_step: closed forms, and what is kept of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from firecaffe.data import DataConfig, open_data
from firecaffe.models.config import ModelConfig
from firecaffe.plan.compute_time import data_s, micro_batch, update_s
from firecaffe.plan.forecast import forecast
from firecaffe.plan.modes import forecast_mode
from firecaffe.plan.of_recipe import write_forecast
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.rounds import Rounds, plan_rounds
from tests.unit.plan.test_modes import cluster, work

STEPS = 64


def found(leaves: int, bandwidth: float = 1e15, **words: Any) -> dict[str, Any]:
    made, on, config = work(leaves), cluster(bandwidth), SynchronyConfig(**words)
    rounds = Rounds(STEPS)
    if config.mode == "local":
        rounds = plan_rounds(config, config.warm_steps, STEPS, lambda _: 0.1)
    return forecast_mode(made, on, forecast(made, on, 4, "tree"), config, rounds)


def taken(leaves: int) -> tuple[float, float]:
    """Seconds of a micro-batch, and of an update."""
    made, device = work(leaves), cluster().device
    leaf_s = micro_batch(made, device, made.micro_batch_size).compute_s + data_s(made, device)
    return leaf_s, update_s(made, device)


def test_nobody_waits_for_a_server_that_costs_nothing() -> None:
    row = found(32, mode="asynchronous", warm_steps=5)
    leaf_s, _ = taken(32)
    assert row["step_s"] == pytest.approx(32 / 4 * leaf_s, rel=0.02)
    assert row["staleness"] == pytest.approx(3, abs=0.05)  # a learner for each of 4 workers
    assert row["bytes_per_step"] == pytest.approx(2 * 24 * work(32).parameter_bytes, rel=0.01)
    assert (row["after_step"], row["mode_in_words"]) == (5, "asynchronous")
    error = cluster().device.error
    assert row["step_low_s"] == pytest.approx((1 - error) * row["step_s"], rel=0.01)
    assert row["step_high_s"] == pytest.approx((1 + error) * row["step_s"], rel=0.01)
    assert found(32, mode="asynchronous", in_flight=2)["staleness"] == pytest.approx(7, abs=0.2)


@pytest.mark.parametrize(("local_steps", "mean"), [(8, 8), (10, 9)])
def test_replicas_wait_once_a_round(local_steps: int, mean: int) -> None:
    """64 steps are rounds of 8, or six of 10 and one of 4, 9.1 on average; ahead are 0."""
    row = found(32, 1e7, mode="local", local_steps=local_steps, replicas=8)
    leaf_s, update = taken(32)
    exchange_s = forecast(work(32), cluster(1e7), 4, "tree").exchange_s
    own_s, waits_s = 8 * leaf_s + 2 * update, exchange_s / mean
    assert row["step_s"] == pytest.approx(own_s + waits_s, rel=0.01)
    # The band is that of the device and of the link.
    compute, link = cluster().device.error, cluster().links[0].error
    assert compute != link
    for word, sign in (("low", -1), ("high", 1)):
        expected = (1 + sign * compute) * own_s + (1 + sign * link) * waits_s
        assert row[f"step_{word}_s"] == pytest.approx(expected, rel=0.01)
    assert row["average_s"] == pytest.approx(exchange_s)
    assert row["mode_in_words"] == f"local, H = {mean}"
    assert found(32, mode="local", warm_steps=6)["after_step"] == 6


def test_fragments_are_averaged_one_by_one() -> None:
    """LeNet's largest parameter has 93 % of its bytes: it is a fragment, and bounds the peak. In
    all a cycle sends as much; what is under way beside a step is short enough, or not.
    """
    words = {"mode": "local", "local_steps": 8, "replicas": 8, "overlap_steps": 1}
    whole, parts = (found(32, 1e7, fragments=count, **words) for count in (1, 4))
    assert parts["bytes_per_step"] == whole["bytes_per_step"]
    assert parts["average_s"] == pytest.approx(whole["average_s"] / 4)
    assert whole["average_bytes"] == work(32).parameter_bytes
    sizes = sorted(work(32).tensors_bytes)
    assert parts["average_bytes"] == pytest.approx(sizes[-1])
    assert sizes[-1] > sum(sizes[:-1])
    leaf_s, update = taken(32)
    own_s, exchange_s = 8 * leaf_s + 2 * update, whole["average_s"]
    largest_s = exchange_s * sizes[-1] / sum(sizes)
    assert (exchange_s - largest_s) < own_s < largest_s  # one of four takes longer than a step
    assert parts["step_s"] == pytest.approx(own_s + (largest_s - own_s) / 8, rel=0.01)
    assert whole["step_s"] == pytest.approx(own_s + (exchange_s - own_s) / 8, rel=0.01)
    assert parts["mode_in_words"] == "local, H = 8, 4 fragments, 1 steps beside"


def test_who_hosts_more_replicas_is_waited_for() -> None:
    """Of six, four workers host 2, 2, 1 and 1, of four micro-batches each."""
    row = found(24, mode="local", replicas=6)
    leaf_s, update = taken(24)
    assert row["step_s"] == pytest.approx(8 * leaf_s + 2 * update, rel=0.01)


RECIPE = Recipe(
    model=ModelConfig(name="lenet"),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=32, micro_batch_size=8, steps=STEPS),
)


@pytest.mark.parametrize(
    ("mode", "said"),
    [("stale", "in mode stale, s = 4; staleness "), ("local", "H = 8; an average takes ")],
)
def test_it_is_kept_and_said(tmp_path: Path, mode: str, said: str) -> None:
    recipe = replace(RECIPE, synchrony=SynchronyConfig(mode))
    rounds = plan_rounds(recipe.synchrony, 0, STEPS, lambda _: 0.1)
    where = open_data(RECIPE.data), 4, 4, torch.device("cpu"), "tree", rounds
    [line] = write_forecast(tmp_path, check_recipe(recipe), *where)
    assert line.startswith("forecast: ")
    assert said in line
    kept = json.loads((tmp_path / "forecast.json").read_text())
    assert (kept["mode"], kept["cluster"], kept["workers"]) == (mode, "cpu-host", 4)
    assert kept["step_low_s"] < kept["step_s"] < kept["step_high_s"]
    simulated = SynchronyConfig("stale", clock="simulated")
    [line] = write_forecast(tmp_path, check_recipe(replace(recipe, synchrony=simulated)), *where)
    assert line.startswith("no forecast: under the simulated clock")
