"""Runs of other modes: forecast and explained, replayed, and verified by their logs."""

import json
import shutil
from pathlib import Path

import pytest

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, SynchronyConfig, TrainConfig
from firecaffe.api.verify import line
from firecaffe.cli import main
from firecaffe.training.verification import Verified
from tests.cli.commands import Capture, refused
from tests.cli.stale_run import train_stale


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_stale(tmp_path_factory.mktemp("stale") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(trained, tmp_path / "run")


def test_a_replay_is_the_same(run: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["replay", str(run), "--to", str(tmp_path / "again")]
    assert main(words) == 0
    (said,) = capsys.readouterr().out.splitlines()
    # The version counts the warm step.
    assert said.startswith("same: 9 updates of 3 steps; weights ")
    assert (tmp_path / "again" / "checkpoints" / "step-00000003").is_dir()
    assert main(words) == 8


def test_a_replay_that_differs_or_cannot_be(run: Path, capsys: Capture) -> None:
    result, events = run / "result.json", run / "events.jsonl"
    text, lines = result.read_text(), events.read_bytes().splitlines(keepends=True)
    result.write_text(text.replace('"weights_sha256": "', '"weights_sha256": "0'))
    error = refused(capsys, 7, "replay", run)
    assert "differs from its replay after step 3: weights; weights 0" in error
    events.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    assert "events.jsonl line 5: is not what was written" in refused(capsys, 8, "replay", run)
    events.unlink()
    assert "No such file" in refused(capsys, 8, "replay", run)


def test_verify_computes_steps_once_more(run: Path, capsys: Capture) -> None:
    assert main(["verify", str(run), "--steps", "2"]) == 0
    said = "same: 2 of 3 steps once more on one worker, 5 updates from the log of events; "
    assert capsys.readouterr().out == f"{said}compared 2 losses\n"
    assert main(["verify", str(run)]) == 0
    said = "compared 3 losses, every tensor after step 3, the weights after step 3, the result\n"
    assert capsys.readouterr().out.endswith(said)
    metrics = run / "metrics.jsonl"
    rows = [json.loads(each) for each in metrics.read_text().splitlines()]
    rows[1]["loss"] = 2.5
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = refused(capsys, 7, "verify", run)
    assert "differs from its steps on one worker in step 2: loss 2.5 in metrics" in error


def test_many_verified_steps_are_counted() -> None:
    verified = Verified(1500, 600, 0, 600, [100, 200], [*range(1, 601)])
    assert line(verified) == (
        "same: 600 of 1,500 steps once more on one worker; compared 600 losses, every tensor after "
        "600 steps, 1 to 600, the weights after steps 100, 200"
    )


@pytest.mark.parametrize("words", ["replay RUN", "verify RUN", "predict RUN", "bench step"])
def test_one_of_several_ranks_does_not_do_all_of_it(
    words: str, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    more = ["--model", "lenet"] if words == "bench step" else []
    error = refused(capsys, 6, *words.replace("RUN", str(trained)).split(), *more)
    assert "computes in one process, and this one was started as rank 0 of 2" in error


MODES = {
    "asynchronous": SynchronyConfig("asynchronous", warm_steps=1, in_flight=2),
    "local": SynchronyConfig("local", replicas=2, local_steps=2),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_forecast_scored_and_explained(mode: str, tmp_path: Path, capsys: Capture) -> None:
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
    lines = [each.partition("  ")[2] for each in said.splitlines() if "measured" in each]
    assert lines[0].startswith(f"forecast for cpu-host in mode {mode}")
    assert json.loads((run / "forecast.json").read_text())["mode"] == mode
    assert main(["explain", str(run)]) == 0
    explained = capsys.readouterr().out
    assert all(each in explained for each in lines)  # the same words, and numbers
    if mode == "asynchronous":
        names = ["staleness", "idle time of a worker", "a step sends"]
        assert [each.split(":")[0] for each in lines[1:]] == names
        assert "of 20 gradients, 0 dropped" in explained
    else:
        assert "2 replicas, 3 averages" in explained
