"""A run's forecast: what it says, when there is none, and with measured steps, by hand."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch

from firecaffe.api.answer import write_cluster
from firecaffe.data import DataConfig, DataParts, TensorDataset, open_data
from firecaffe.data.datasets import divide
from firecaffe.data.own_data import check_own
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models import ModelConfig
from firecaffe.parallel.config import ParallelConfig
from firecaffe.planner.calibrate import MIN_ERROR
from firecaffe.planner.cluster import Cluster, Link, load_cluster
from firecaffe.planner.compute_time import micro_batch
from firecaffe.planner.forecast import forecast
from firecaffe.planner.recipe_layout import RecipeLayout, forecast_parallel
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.planner.run_forecast import FirstForecast, write_forecast
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.runs.run_folder import RunConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.rounds import plan_rounds
from tests.unit.models.own_nets import PLACE

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
    row: dict[str, Any] = kept_in(first.folder)["refined"]
    return row


def test_one_worker_takes_what_was_measured_and_both_forecasts_are_kept(tmp_path: Path) -> None:
    first = kept(tmp_path, 1)
    # Too few steps leave the first forecast, and so do those of a rank without work.
    assert first.refine(series(4)[:7]) == first.refine(series(0)) == ""
    assert "refined" not in kept_in(tmp_path)
    line = first.refine(series(8))
    both = kept_in(tmp_path)
    second = both.pop("refined")
    assert both == json.loads(json.dumps(first.row))  # tuples are lists in JSON
    step_s = 8 * (COMPUTE_S + DATA_S) + UPDATE_S
    # All of it is computing, and a series without spread has an error all the same.
    for word, sign in (("step_s", 0), ("step_low_s", -1), ("step_high_s", 1)):
        assert second[word] == pytest.approx((1 + sign * MIN_ERROR) * step_s)
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
    layout = RecipeLayout(ParallelConfig(2, 2, split, 4), split)
    plain_s, shared_s = (
        forecast_parallel(recipe.model, work, cluster, layout, 4, "tree")["compute_s"]
        for cluster in (HOST, two)
    )
    assert shared_s == pytest.approx(2 * plain_s)


def line_of(folder: Path, of_a_host: int, workers: int = 4, data: Any = DATA, **words: Any) -> str:
    """The line of the forecast of a run; words: its rounds, other sections of the recipe."""
    rounds = words.pop("rounds", None)
    recipe = check_recipe(replace(RECIPE, **words))
    where = workers, of_a_host, torch.device("cpu"), "tree", rounds
    [line], _ = write_forecast(folder, recipe, data, *where)
    return line


def kept_in(folder: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((folder / "forecast.json").read_text())
    return kept


def test_one_host_without_gpus_is_forecast_on_the_shipped_one(tmp_path: Path) -> None:
    line = line_of(tmp_path, 4)
    assert (kept_in(tmp_path)["cluster"], kept_in(tmp_path)["workers"]) == ("cpu-host", 4)
    assert line.startswith("forecast: ")
    assert line.endswith("samples/s on cpu-host")


class Own(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Which nobody knows how long a sample takes of."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1, 28, 28), 0


def test_a_forecast_says_that_the_time_of_own_data_is_not_in_it(tmp_path: Path) -> None:
    own = check_own("train_set", Own())
    held = TensorDataset(*own.batch(torch.arange(64)))
    for part, end in ((own, "cpu-host; without the time that the data take"), (held, "cpu-host")):
        data = divide(DataParts(part, part), DataConfig("own data"))
        assert line_of(tmp_path, 1, 1, data).endswith(f"samples/s on {end}")
        assert kept_in(tmp_path)["is_without_data"] == (part is own)


def test_several_hosts_have_the_forecast_of_the_cluster_that_is_named(tmp_path: Path) -> None:
    """If its file knows as many; else not that of an earlier attempt, on one host."""
    line_of(tmp_path, 4)
    one = replace(HOST, devices_per_node=2, most_devices=2)
    write_cluster(tmp_path / "mine.toml", replace(one, name="mine"))
    for cluster, of_a_host, begin in (
        ("", 2, "no forecast: several hosts"),
        (str(tmp_path / "mine.toml"), 2, "no forecast: several hosts, and mine is one"),
        (str(tmp_path / "mine.toml"), 4, "no forecast: 4 workers, and mine"),
    ):
        assert line_of(tmp_path, of_a_host, run=RunConfig(cluster=cluster)).startswith(begin)
        assert not (tmp_path / "forecast.json").exists()
    line = line_of(tmp_path, 2, run=RunConfig(cluster="ethernet-10g"))
    assert line.startswith("forecast: ")
    assert (tmp_path / "forecast.json").exists()


def test_a_network_of_ones_own_and_samples_that_are_trees_are_forecast(tmp_path: Path) -> None:
    """Reads is one that the meta device does not do for."""
    vectors = torch.zeros(64, 4)
    inputs = {"left": vectors, "right": vectors}
    samples = TensorDataset(inputs, torch.arange(64) % 3, num_classes=3)
    trees = divide(DataParts(samples, samples), DataConfig("own data"))
    for member, data in (("Net", DATA), ("Reads", DATA), ("Pair", trees)):
        model = ModelConfig(f"{PLACE}:{member}")
        assert line_of(tmp_path, 2, 2, data, model=model).startswith("forecast: ")


def test_measured_shares_are_priced_by_the_way_that_they_go() -> None:
    """By messages, not by the memory that ranks of a host share."""
    measured = replace(RECIPE, synchrony=SynchronyConfig(shares="measured"))
    plain, other = (
        forecast(workload_of(check_recipe(recipe), DATA), HOST, 4, "tree").step_s
        for recipe in (RECIPE, measured)
    )
    assert plain != other


def test_frozen_layers_are_neither_exchanged_nor_all_differentiated() -> None:
    whole, part, middle = (
        workload_of(check_recipe(replace(RECIPE, model=ModelConfig("lenet", freeze=names))), DATA)
        for names in ([], ["conv*"], ["conv2.*"])
    )
    frozen_bytes = 4 * (20 * 26 + 50 * (20 * 25 + 1))
    assert part.frozen_bytes == frozen_bytes
    assert part.parameter_bytes == whole.parameter_bytes - frozen_bytes
    shares = {layer.name: layer.backward_share for layer in part.layers}
    assert (shares["conv1"], shares["conv2"], shares["ip1"]) == (0.0, 0.0, 1.0)
    shares = {layer.name: layer.backward_share for layer in middle.layers}
    assert (shares["conv1"], shares["conv2"], shares["ip1"]) == (1.0, 0.5, 1.0)
    device = HOST.device
    times = [micro_batch(work, device, 8).compute_s for work in (part, middle, whole)]
    assert times[0] < times[1] < times[2]
    assert part.activation_bytes < whole.activation_bytes


@pytest.mark.parametrize(
    ("mode", "said"),
    [("stale", "in mode stale, s = 4; staleness "), ("local", "H = 8; an average takes ")],
)
def test_a_mode_is_kept_and_said(tmp_path: Path, mode: str, said: str) -> None:
    words = SynchronyConfig(mode)
    line = line_of(tmp_path, 4, rounds=plan_rounds(words, 0, 100, lambda _: 0.1), synchrony=words)
    assert line.startswith("forecast: ")
    assert said in line
    row = kept_in(tmp_path)
    assert (row["mode"], row["cluster"], row["workers"]) == (mode, "cpu-host", 4)
    assert row["step_low_s"] < row["step_s"] < row["step_high_s"]
    simulated = SynchronyConfig("stale", clock="simulated")
    line = line_of(tmp_path, 4, synchrony=simulated)
    assert line.startswith("no forecast: under the simulated clock")
