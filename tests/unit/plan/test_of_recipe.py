"""What a run's forecast says, and when there is none."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firecaffe.data import DataConfig
from firecaffe.models.config import ModelConfig
from firecaffe.plan.of_recipe import write_forecast
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.folder import RunConfig

RECIPE = Recipe(
    model=ModelConfig(name="lenet"),
    data=DataConfig(name="generated"),
    train=TrainConfig(global_batch_size=32, micro_batch_size=8, steps=10),
)
CPU = torch.device("cpu")


def test_one_host_without_gpus_is_forecast_on_the_shipped_one(tmp_path: Path) -> None:
    [line] = write_forecast(tmp_path, RECIPE, 4, 4, CPU, "tree")
    kept = json.loads((tmp_path / "forecast.json").read_text())
    assert (kept["cluster"], kept["workers"]) == ("cpu-host", 4)
    assert line.startswith("forecast: ")
    assert line.endswith("images/s on cpu-host")


@pytest.mark.parametrize("cluster", ["", "ethernet-10g"])
def test_several_hosts_have_the_forecast_of_the_cluster_that_is_named(
    tmp_path: Path, cluster: str
) -> None:
    recipe = replace(RECIPE, run=RunConfig(cluster=cluster))
    [line] = write_forecast(tmp_path, recipe, 4, 2, CPU, "tree")
    assert (tmp_path / "forecast.json").exists() == bool(cluster)
    assert line.startswith("forecast: " if cluster else "no forecast: several hosts")
