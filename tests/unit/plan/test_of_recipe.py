"""What a run's forecast says, and when there is none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firecaffe.cli.cluster_file import write_cluster
from firecaffe.data import DataConfig, DataParts, TensorDataset, open_data
from firecaffe.data.datasets import divide
from firecaffe.data.own_data import check_own
from firecaffe.models.config import ModelConfig
from firecaffe.plan.cluster import load_cluster
from firecaffe.plan.compute_time import micro_batch
from firecaffe.plan.forecast import forecast
from firecaffe.plan.of_recipe import workload_of, write_forecast
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.run_folder import RunConfig
from firecaffe.synchrony.config import SynchronyConfig
from tests.unit.models.own_nets import PLACE

RECIPE = Recipe(
    model=ModelConfig(name="lenet"),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=32, micro_batch_size=8, steps=10),
)
CPU = torch.device("cpu")
DATA = open_data(RECIPE.data)


def test_one_host_without_gpus_is_forecast_on_the_shipped_one(tmp_path: Path) -> None:
    [line] = write_forecast(tmp_path, check_recipe(RECIPE), DATA, 4, 4, CPU, "tree")
    kept = json.loads((tmp_path / "forecast.json").read_text())
    assert (kept["cluster"], kept["workers"]) == ("cpu-host", 4)
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
        [line] = write_forecast(tmp_path, check_recipe(RECIPE), data, 1, 1, CPU, "tree")
        assert line.endswith(f"samples/s on {end}")
        kept = json.loads((tmp_path / "forecast.json").read_text())
        assert kept["is_without_data"] == (part is own)


@pytest.mark.parametrize("cluster", ["", "ethernet-10g"])
def test_several_hosts_have_the_forecast_of_the_cluster_that_is_named(
    tmp_path: Path, cluster: str
) -> None:
    recipe = replace(RECIPE, run=RunConfig(cluster=cluster))
    [line] = write_forecast(tmp_path, check_recipe(recipe), DATA, 4, 2, CPU, "tree")
    assert (tmp_path / "forecast.json").exists() == bool(cluster)
    assert line.startswith("forecast: " if cluster else "no forecast: several hosts")


@pytest.mark.parametrize(
    ("of_a_host", "said"),
    [(2, "no forecast: several hosts, and mine is one"), (4, "no forecast: 4 workers, and mine")],
)
def test_a_file_that_knows_fewer_hosts_says_why_there_is_no_forecast(
    tmp_path: Path, of_a_host: int, said: str
) -> None:
    one = replace(load_cluster("cpu-host"), devices_per_node=2, most_devices=2)
    write_cluster(tmp_path / "mine.toml", replace(one, name="mine"))
    recipe = replace(RECIPE, run=RunConfig(cluster=str(tmp_path / "mine.toml")))
    [line] = write_forecast(tmp_path, check_recipe(recipe), DATA, 4, of_a_host, CPU, "tree")
    assert line.startswith(said)
    assert not (tmp_path / "forecast.json").exists()


@pytest.mark.parametrize("member", ["Net", "Reads"])
def test_a_network_of_ones_own_is_forecast(tmp_path: Path, member: str) -> None:
    """Reads is one that the meta device does not do for."""
    recipe = replace(RECIPE, model=ModelConfig(f"{PLACE}:{member}"))
    [line] = write_forecast(tmp_path, check_recipe(recipe), DATA, 2, 2, CPU, "tree")
    assert line.startswith("forecast: ")


def test_samples_that_are_trees_are_forecast(tmp_path: Path) -> None:
    vectors = torch.zeros(64, 4)
    inputs = {"left": vectors, "right": vectors}
    samples = TensorDataset(inputs, torch.arange(64) % 3, num_classes=3)
    recipe = replace(RECIPE, model=ModelConfig(f"{PLACE}:Pair"))
    data = divide(DataParts(samples, samples), DataConfig("own data"))
    [line] = write_forecast(tmp_path, check_recipe(recipe), data, 2, 2, CPU, "tree")
    assert line.startswith("forecast: ")


def test_measured_shares_are_priced_by_the_way_that_they_go() -> None:
    """By messages, not by the memory that ranks of a host share."""
    measured = replace(RECIPE, synchrony=SynchronyConfig(shares="measured"))
    cluster = load_cluster("cpu-host")
    plain, other = (
        forecast(workload_of(check_recipe(each), DATA), cluster, 4, "tree").step_s
        for each in (RECIPE, measured)
    )
    assert plain != other


def test_frozen_layers_are_neither_exchanged_nor_all_differentiated() -> None:
    whole = workload_of(check_recipe(replace(RECIPE, model=ModelConfig("lenet"))), DATA)
    model = ModelConfig("lenet", freeze=["conv*"])
    part = workload_of(check_recipe(replace(RECIPE, model=model)), DATA)
    frozen_bytes = 4 * (20 * 26 + 50 * (20 * 25 + 1))
    assert part.frozen_bytes == frozen_bytes
    assert part.parameter_bytes == whole.parameter_bytes - frozen_bytes
    shares = {layer.name: layer.backward_share for layer in part.layers}
    assert (shares["conv1"], shares["conv2"], shares["ip1"]) == (0.0, 0.0, 1.0)
    middle = workload_of(
        check_recipe(replace(RECIPE, model=ModelConfig("lenet", freeze=["conv2.*"]))), DATA
    )
    shares = {layer.name: layer.backward_share for layer in middle.layers}
    assert (shares["conv1"], shares["conv2"], shares["ip1"]) == (1.0, 0.5, 1.0)
    device = load_cluster("cpu-host").device
    times = [micro_batch(work, device, 8).compute_s for work in (part, middle, whole)]
    assert times == sorted(times)
    assert times[0] < times[1] < times[2]
    assert part.activation_bytes < whole.activation_bytes
