"""A run's forecast with measured steps in place of the data sheet, against sums done by hand."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from firecaffe.api.cluster_file import write_cluster
from firecaffe.data import DataConfig, open_data
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models.config import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.planner.calibrate import LEAST_ERROR
from firecaffe.planner.cluster import Cluster, Link, load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.of_parallel import OwnLayout, forecast_parallel
from firecaffe.planner.of_recipe import workload_of
from firecaffe.planner.of_run import FirstForecast, write_forecast
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import RunConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.rounds import plan_rounds

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(global_batch_size=64, micro_batch_size=8, steps=100),
)
DATA = open_data(RECIPE.data)
COMPUTE_S, DATA_S, UPDATE_S = 0.3, 0.002, 0.005
"""Of a micro-batch, of a micro-batch, of a step."""

HOST = load_cluster("cpu-host")
WRONG = replace(HOST, device=replace(HOST.device, efficiency=0.001, exchange_slowdown=0.3))


def kept(folder: Path, workers: int, cluster: Cluster = WRONG, **words: Any) -> FirstForecast:
    """The forecast of a run of the recipe; words: its rounds, layers that are split, sections."""
    rounds, chosen = (words.pop(name, None) for name in ("rounds", "chosen"))
    write_cluster(folder / "wrong.toml", cluster)
    run = RunConfig(cluster=str(folder / "wrong.toml"))
    recipe = check_recipe(replace(RECIPE, run=run, **words))
    where = workers, workers, torch.device("cpu"), "tree", rounds, chosen
    _, first = write_forecast(folder, recipe, DATA, *where)
    assert first is not None
    return first


def series(micro_batches: int, growth: float = 0.0, **others: Any) -> list[dict[str, Any]]:
    """Sixteen steps; those of growth 1 ms take 1 to 16 ms longer."""
    rest = {"micro_batches": micro_batches, "data_s": micro_batches * DATA_S, "update_s": UPDATE_S}
    return [
        {"step": 4 + n, "compute_s": micro_batches * (COMPUTE_S + growth * n), **rest, **others}
        for n in range(1, 17)
    ]


def refined(first: FirstForecast, rows: list[dict[str, Any]]) -> dict[str, Any]:
    assert first.refine(rows)
    row: dict[str, Any] = json.loads((first.folder / "forecast.json").read_text())["refined"]
    return row


def test_one_worker_takes_what_was_measured_and_both_forecasts_are_kept(tmp_path: Path) -> None:
    first = kept(tmp_path, 1)
    # Too few steps leave the first forecast, and so do those of a rank without work.
    assert first.refine(series(4)[:7]) == first.refine(series(0)) == ""
    assert "refined" not in json.loads((tmp_path / "forecast.json").read_text())
    line = first.refine(series(8))
    both = json.loads((tmp_path / "forecast.json").read_text())
    second = both.pop("refined")
    assert both == json.loads(json.dumps(first.row))  # tuples are lists in JSON
    step_s = 8 * (COMPUTE_S + DATA_S) + UPDATE_S
    # All of it is computing, and a series without spread has an error all the same.
    for word, sign in (("step_s", 0), ("step_low_s", -1), ("step_high_s", 1)):
        assert second[word] == pytest.approx((1 + sign * LEAST_ERROR) * step_s)
    made_from = second["made_from"]
    assert (made_from["first_step"], made_from["last_step"]) == (5, 20)
    assert made_from["compute_s"] == pytest.approx(COMPUTE_S)
    assert "with compute measured in steps 5 to 20: 2.42e+03 ms (2.37e+03 to 2.47e+03)" in line


def test_the_band_is_that_of_the_steps_and_workers_wait_for_the_slowest(tmp_path: Path) -> None:
    """The tenths of 1 to 16 are 1.7 and 15.3, their median is 8.5."""
    row = refined(kept(tmp_path, 2), series(4, growth=0.001))
    middle_s = COMPUTE_S + 0.0085
    error = 0.0068 / middle_s
    assert row["made_from"]["error"] == pytest.approx(error)
    blom = NormalDist().inv_cdf((2 - 0.375) / (2 + 0.25))
    waits = 1 + error / 1.28 * blom  # of steps; that of micro-batches is sqrt(4) times as much
    assert row["made_from"]["jitter"] == pytest.approx(error * sqrt(4) / 1.28)
    assert row["compute_s"] == pytest.approx(4 * middle_s * waits, rel=1e-3)
    assert row["low"]["compute_s"] == pytest.approx((1 - error) * row["compute_s"], rel=1e-3)


@pytest.mark.parametrize("workers", [2, 4])
def test_what_slows_a_measured_step_is_not_added_again(tmp_path: Path, workers: int) -> None:
    """By an exchange beside it, and by other workers on its core; it updates its shard alone."""
    share = 8 // workers
    crowded = replace(WRONG, cores_per_node=1)
    found = kept(tmp_path, workers, crowded, exchange=ExchangeConfig(update_at="shards"))
    row = refined(found, series(share))
    assert row["compute_s"] == pytest.approx(share * COMPUTE_S, rel=1e-3)
    assert row["data_s"] == pytest.approx(share * DATA_S)
    assert row["update_s"] == pytest.approx(UPDATE_S)
    assert row["exchange_s"] == pytest.approx(found.row["exchange_s"])


def test_a_split_network_computes_its_part(tmp_path: Path) -> None:
    split = {"ip1": "neurons", "ip2": "inputs"}
    first = kept(tmp_path, 2, chosen=split, parallel=ParallelConfig(1, 2, split, 4))
    row = refined(first, series(8))
    assert row["compute_s"] == pytest.approx(8 * COMPUTE_S, rel=1e-3)
    assert row["activations_s"] == pytest.approx(first.row["activations_s"])


def test_the_first_stage_tells_of_all(tmp_path: Path) -> None:
    """It takes three times as long as was forecast. So the others do, and a step without links."""
    free = replace(WRONG, links=(Link("wire", 0.0, 1e15),))
    first = kept(tmp_path, 2, free, chosen={}, parallel=ParallelConfig(stages=["ip1"]))
    before = first.row["stages_s"]
    rows = [row | {"compute_s": 3 * before[0]} for row in series(8, stage=0)]
    row = refined(first, rows)
    assert row["stages_s"] == pytest.approx([3 * seconds for seconds in before], rel=1e-3)
    assert row["compute_s"] == pytest.approx(3 * max(before), rel=1e-3)
    empty = replace(first, row={**first.row, "stages_s": (0.0, 1.0)})
    assert empty.refine(rows) == ""  # and the training goes on


def test_replicas_and_a_server(tmp_path: Path) -> None:
    """Replicas update while they compute; of a server's step each worker's part is known."""
    local = SynchronyConfig("local", local_steps=4)
    rounds = plan_rounds(local, 0, 100, lambda _: 0.1)
    crowded = replace(WRONG, cores_per_node=2)
    found = kept(tmp_path, 4, crowded, rounds=rounds, synchrony=local)
    row = refined(found, series(2))
    assert row["average_s"] == pytest.approx(found.row["average_s"])
    own_s = 2 * (COMPUTE_S + DATA_S) + UPDATE_S
    assert row["step_s"] == pytest.approx(own_s + row["average_s"] / 4, rel=1e-3)

    found = kept(tmp_path, 4, synchrony=SynchronyConfig("asynchronous", warm_steps=1))
    by_rank = dict.fromkeys(range(4), (2, 2 * COMPUTE_S))
    row = refined(found, series(2, by_rank=by_rank))
    assert row["made_from"]["compute_s"] == pytest.approx(COMPUTE_S)
    assert row["step_s"] == pytest.approx(2 * COMPUTE_S, rel=0.05)  # and messages


def test_workers_beyond_the_cores_of_a_node_share_them() -> None:
    recipe = check_recipe(RECIPE)
    work = workload_of(recipe, DATA)
    two = replace(HOST, cores_per_node=2)

    def row(cluster: Cluster, workers: int, threads: int = 1) -> Any:
        return forecast(replace(work, threads=threads), cluster, workers, "tree")

    assert row(two, 2) == row(HOST, 2)
    compute_s = row(HOST, 4).compute_s
    assert row(two, 4).compute_s == pytest.approx(2 * compute_s)
    assert row(two, 4).speedup < 2
    assert row(two, 2, threads=2).compute_s == pytest.approx(4 * compute_s)
    nodes = replace(two, devices_per_node=2)
    assert row(nodes, 4).compute_s == pytest.approx(compute_s)
    split = {"ip1": "neurons", "ip2": "inputs"}
    layout = OwnLayout(ParallelConfig(2, 2, split, 4), split)
    plain_s, shared_s = (
        forecast_parallel(recipe.model, work, cluster, layout, 4, "tree")["compute_s"]
        for cluster in (HOST, two)
    )
    assert shared_s == pytest.approx(2 * plain_s)
