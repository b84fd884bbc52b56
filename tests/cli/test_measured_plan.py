"""Forecasts of runs, in every mode: refined by steps, scored and explained; `plan --measure`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SynchronyConfig, TrainConfig
from firecaffe.api import step_rates
from firecaffe.api.answer import write_cluster
from firecaffe.planner.cluster import load_cluster
from tests import typed
from tests.cli.test_plan import plan, planned

SMALL = (
    '[model]\nname = "lenet"\n[data]\nname = "generated"\n'
    "[train]\nglobal_batch_size = 32\nmicro_batch_size = 4\nsteps = 30\n"
    "[run]\ntensorboard = false\n"
)


def test_measured_steps_replace_a_wrong_forecast(tmp_path: Path) -> None:
    """Of a cluster file whose device is a thousand times too slow."""
    recipe, file, run = (tmp_path / name for name in ("recipe.toml", "wrong.toml", "run"))
    recipe.write_text(SMALL)
    host = load_cluster("cpu-host")
    wrong = replace(host.device, peak_flops={"float32": 8e7}, memory_bytes_per_s=8e6)
    write_cluster(file, replace(host, device=wrong))
    words = ["--run.folder", str(run), "--run.cluster", str(file)]
    done = typed.firecaffe("train", str(recipe), "--nproc-per-node", "2", *words)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "with compute measured" in line]
    assert "in steps 5 to 20: " in line
    kept = json.loads((run / "forecast.json").read_text())
    second = kept["refined"]
    assert (second["workers"], second["made_from"]["micro_batches"]) == (2, 4)
    assert 0 < second["step_low_s"] < second["step_s"] < second["step_high_s"]
    score = json.loads(typed.said_by("explain", run, "--json"))["score"]
    measured_s = score["step"]["measured_s"]
    assert score["step"]["forecast_s"] == second["step_s"]
    assert score["first_s"] == kept["step_s"]
    assert abs(second["step_s"] - measured_s) < abs(kept["step_s"] - measured_s)


def test_a_step_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_rates, "PLAN_SECONDS", 0.0)
    monkeypatch.setattr(step_rates, "cores", lambda: 2)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL.replace('"generated"', f'"fashion-mnist"\npath = "{tmp_path}/none"'))
    code, out, err = plan(str(recipe), "--measure", "--workers", "1,4")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("measured here: lenet")]
    assert "each node has the 2 cores of this host" in line
    assert "from 4 workers on, those of a node share its 2 cores" in out
    (found,) = planned(str(recipe), "--measure", "--workers", "1")
    [row] = found["rows"]
    assert row["compute_s"] - row["low"]["compute_s"] >= 0.02 * row["compute_s"]  # the device: 60 %
    for words, said in (
        (["--model", "lenet"], "--measure goes with a recipe"),
        ([str(recipe), "--precision", "fp32"], "--precision has no effect beside --measure"),
    ):
        code, _, err = plan(*words, "--measure")
        assert (code, len(err.splitlines())) == (2, 1)
        assert said in err


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
    told = typed.said_by("explain", run)
    assert all(line in told for line in lines)  # the same words, and numbers
    if mode == "asynchronous":
        names = ["staleness", "idle time of a worker", "a step sends"]
        assert [line.split(":")[0] for line in lines[1:]] == names
        assert "of 20 gradients, 0 dropped" in told
    else:
        assert "2 replicas, 3 averages" in told
