"""A run whose network is split, or in stages, has a forecast, which `explain` scores."""

import json

import pytest
from torch import nn

from firecaffe import DataConfig, ModelConfig, ParallelConfig, Recipe, TrainConfig
from firecaffe.cli import main
from firecaffe.models.squeezenet import Fire
from tests.kit.worlds import NAMED, Trained, changed

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(32, 8, steps=3, device="cpu", eval_batch_size=500),
)
SPLIT = {"ip1": "neurons", "ip2": "inputs"}
LAYOUTS = {
    "trick": ParallelConfig(1, 2, SPLIT, 4, "one_weird_trick"),
    "same samples": ParallelConfig(1, 2, SPLIT, 4),
    "stages": ParallelConfig(stages=["ip1"]),
    "rows": ParallelConfig(1, 2, {"conv*": "rows"}, 2),
    "paths": ParallelConfig(1, 2, {"2": "paths"}, 2),
}


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 7, stride=4), nn.ReLU(), Fire(4, 2, 4), nn.Flatten()),
        nn.Linear(8 * 36, 10),
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_a_layout(trained: Trained, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = changed(RECIPE, parallel=LAYOUTS[name])
    if name == "paths":
        recipe = changed(recipe, model=ModelConfig(f"{__name__}:blocks"))
    folder = trained(2, recipe, NAMED).folder
    found = json.loads((folder / "forecast.json").read_text())
    assert found["parallel"]["stages"] == LAYOUTS[name].stages
    assert found["workers"] == 2
    assert 0 < found["step_low_s"] < found["step_s"] < found["step_high_s"]
    assert main(["explain", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "forecast for cpu-host: " in told
    assert ("waits for activations: forecast" in told) == (name != "stages")
    assert ("a stage does not compute: forecast" in told) == (name == "stages")
