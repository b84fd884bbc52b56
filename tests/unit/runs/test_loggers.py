"""Loggers: what they are told, and that none of them ends a training.

The libraries are tried offline, if they are installed (`pip install firecaffe[loggers]`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import firecaffe
from firecaffe import DataConfig, Recipe, RunConfig, TrainConfig
from firecaffe.errors import RecipeError
from firecaffe.runs import record
from firecaffe.runs.record import LOGGERS, Loggers, check_libraries, check_loggers
from tests.kit.training import images

RECIPE = Recipe(
    train=TrainConfig(8, 4, steps=3, eval_every=2), data=DataConfig(hold_out=0.25), run=RunConfig()
)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def fit(folder: Path, names: list[str]) -> firecaffe.Result:
    run = RunConfig(str(folder), tensorboard=False, loggers=names)
    return firecaffe.train(replace(RECIPE, run=run), network, images(40, 0), images(30, 1))


class Told:
    """A logger that keeps what it is told, and raises in `fails`."""

    calls: list[tuple[Any, ...]]
    fails = ""

    def begin(self, folder: Path, title: str, words: Mapping[str, Any]) -> None:
        type(self).calls = []
        self.keep("begin", folder, dict(words))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.keep("log", step, dict(numbers))

    def end(self, result: Mapping[str, Any] | None) -> None:
        self.keep("end", result)

    def keep(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise OSError("the service is away")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> type[Told]:
    monkeypatch.setitem(LOGGERS, "told", Told)
    monkeypatch.setattr(record, "find_spec", lambda name: name)
    monkeypatch.setattr(Told, "fails", "")
    return Told


def test_they_get_words_numbers_and_the_result(told: type[Told], tmp_path: Path) -> None:
    result = fit(tmp_path / "run", ["told"])
    (_, folder, words), *logged, (name, end) = told.calls
    assert (folder, name) == (tmp_path / "run", "end")
    assert words["train.global_batch_size"] == 8
    assert [(call[1], min(call[2]).split("/")[0]) for call in logged] == [
        *((1, "train"), (2, "train"), (2, "validation"), (3, "train")),
        *((3, "validation"), (3, "test")),
    ]
    assert logged[-1][2]["test/top1"] == end["top1"] == result.metrics["top1"]
    assert all(isinstance(each, float) for each in end.values())


@pytest.mark.parametrize(("fails", "calls"), [("begin", 1), ("log", 2), ("end", 8)])
def test_one_that_fails_is_told_of_once(
    told: type[Told], tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: str, calls: int
) -> None:
    told.fails = fails
    assert fit(tmp_path / "run", ["told"]).steps == 3
    assert len(told.calls) == calls
    lines = [line for line in capsys.readouterr().out.splitlines() if "service is away" in line]
    assert len(lines) == 1
    assert "told failed" in lines[0]
    assert (tmp_path / "run" / "result.json").exists()


def test_a_run_that_does_not_finish_is_ended_too(told: type[Told], tmp_path: Path) -> None:
    few = Loggers(["told"], print)
    few.begin(tmp_path, "title", {})
    few.end(None)
    few.end({"loss": 1.0})
    assert told.calls[1:] == [("end", None)]


def test_what_is_missing_is_said_before() -> None:
    with pytest.raises(RecipeError, match=r"run\.loggers has 'comet'; .*wandb, mlflow"):
        check_loggers(["wandb", "comet"])
    with pytest.raises(RecipeError, match=r"'no_such_library'.*firecaffe\[loggers\]"):
        check_libraries(["no_such_library"])


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb", reason="needs wandb: pip install -e '.[dev]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit(tmp_path / "run", ["wandb"])
    wandb.teardown()  # its process has written all
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    for name in (b"train/loss", b"validation/top1", b"train.global_batch_size", b"images_per_s"):
        assert name in content


@pytest.mark.filterwarnings("ignore")
def test_mlflow_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="needs mlflow: pip install -e '.[dev]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    result = fit(tmp_path / "run", ["mlflow"])
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.status == "FINISHED"
    assert run.data.params["train.global_batch_size"] == "8"
    assert run.data.metrics["result/top1"] == result.metrics["top1"]
    losses = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [each.step for each in losses] == [1, 2, 3]
