"""Runs of other modes than every_step: forecast, scored at their end, and explained."""

import json
from pathlib import Path

import pytest

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SynchronyConfig, TrainConfig
from firecaffe.cli import main

MODES = {
    "asynchronous": SynchronyConfig("asynchronous", warm_steps=1, in_flight=2),
    "local": SynchronyConfig("local", replicas=2, local_steps=2),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_forecast_scored_and_explained(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe = Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated"),
        train=TrainConfig(16, 4, steps=6, eval_batch_size=1000),
        run=RunConfig(folder=str(run), tensorboard=False),
        synchrony=MODES[mode],
    )
    firecaffe.train(recipe)
    said = capsys.readouterr().out
    assert "forecast: " in said
    lines = [line.partition("  ")[2] for line in said.splitlines() if "measured" in line]
    assert lines[0].startswith(f"forecast for cpu-host in mode {mode}")
    assert json.loads((run / "forecast.json").read_text())["mode"] == mode
    assert main(["explain", str(run)]) == 0
    told = capsys.readouterr().out
    assert all(line in told for line in lines)  # the same words, and numbers
    if mode == "asynchronous":
        names = ["staleness", "idle time of a worker", "a step sends"]
        assert [line.split(":")[0] for line in lines[1:]] == names
        assert "of 20 gradients, 0 dropped" in told
    else:
        assert "2 replicas, 3 averages" in told
