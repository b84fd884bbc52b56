"""Records of a run that goes on: JSON lines, curves, where two runs first differ, and loggers.

None of the loggers ends a training. Their libraries are tried offline, if they are installed.
"""

import errno
import json
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]
from torch import nn

import firecaffe
from firecaffe import DataConfig, Recipe, RunConfig, TrainConfig, files
from firecaffe.errors import RecipeError, RunError
from firecaffe.runs import record
from firecaffe.runs.record import (
    LOGGERS,
    JsonLines,
    Loggers,
    Metrics,
    check_libraries,
    check_loggers,
)
from firecaffe.runs.run_folder import FirstDifference, first_difference
from firecaffe.schema import read_rows
from tests.kit.training import images


def test_rows_come_back(tmp_path: Path) -> None:
    """At once, exactly, also after an error; and a record is never written over."""
    rows: list[dict[str, Any]] = [
        {"step": 1, "values": [0.1, 1 / 3, 5e-324, 1.7976931348623157e308]},
        {"step": 2, "loss": None, "text": 'a "b"\n ü'},
    ]
    path = tmp_path / "a.jsonl"
    with suppress(ZeroDivisionError), JsonLines(path) as lines:
        lines.write(rows[0])
        assert list(read_rows(path, dict)) == rows[:1]
        lines.write(rows[1] | {"loss": math.inf})  # which JSON has not
        raise ZeroDivisionError
    assert list(read_rows(path, dict)) == rows
    assert len(path.read_text().splitlines()) == len(rows)
    with pytest.raises(FileExistsError):
        JsonLines(path)


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    rows = [{"step": 1, "x": "ab"}, {"step": 2, "x": "cd"}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for length in range(len(text) + 1):
        (tmp_path / "a.jsonl").write_text(text[:length])
        assert list(read_rows(tmp_path / "a.jsonl", dict)) == rows[: text.count("\n", 0, length)]


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    curves = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    return {
        name: [(event.step, event.value) for event in curves.Scalars(name)]
        for name in curves.Tags()["scalars"]
    }


class Disk(FileIO):
    is_full = True

    def write(self, data: Any, /) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:100])  # as much as there is room for


def test_a_full_disk_is_nothing_that_a_thread_prints_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "FileIO", Disk)
    before = threading.active_count()
    file = files.GrowingFile(tmp_path / "a")
    file.write(b"last words")
    with Metrics(tmp_path, tensorboard=True) as metrics:
        metrics.write("train", 1, {"loss": 0.5})
        assert threading.active_count() == before
        monkeypatch.setattr(Disk, "is_full", False)
        metrics.write("train", 2, {"loss": 0.25})
    assert curves_in(tmp_path) == {"train/loss": [(1, 0.5), (2, 0.25)]}
    file.close()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"last words"
    assert capsys.readouterr().err == ""


def test_metrics_are_curves_as_well(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, {"loss": float(step)})
        metrics.write("test", 3, {"top1": 0.5})
        rows = list(read_rows(tmp_path / "metrics.jsonl", dict))
    assert (len(rows), rows[-1]) == (4, {"kind": "test", "step": 3, "top1": 0.5})
    curves = {"train/loss": [(1, 1.0), (2, 2.0), (3, 3.0)], "test/top1": [(3, 0.5)]}
    assert curves_in(tmp_path) == curves
    # As of an attempt that began earlier, in another process, and was lost after step 1.
    (first,) = (tmp_path / "tensorboard").iterdir()
    first.rename(first.with_name(first.name.replace(".tfevents.", ".tfevents.0")))
    with Metrics(tmp_path, tensorboard=True, after_step=1) as metrics:
        for step in (2, 3, 4):
            metrics.write("train", step, {"loss": step + 0.5})
    assert curves_in(tmp_path)["train/loss"] == [(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]
    (tmp_path / "none").mkdir()
    with Metrics(tmp_path / "none", tensorboard=False) as metrics:
        metrics.write("train", 1, {"loss": 1.0})
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["metrics.jsonl"]


NAMES = ("parameter/conv1.weight", "parameter/a.bias", "losses")


def digests(folder: Path, steps: int, changed: dict[int, tuple[str, ...]] | None = None) -> Path:
    """A run of three tensors; `changed` names tensors with another digest, by step."""
    folder.mkdir()
    with (folder / "digests.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            other = (changed or {}).get(step, ())
            tensors = {name: f"{step}{name}{'!' * (name in other)}" for name in NAMES}
            file.write(json.dumps({"step": step, "tensors": tensors}) + "\n")
    return folder


BIAS, WEIGHT = "parameter/a.bias", "parameter/conv1.weight"


@pytest.mark.parametrize(
    ("steps", "changed", "expected"),
    [
        (3, {}, None),
        (3, {3: ("losses",)}, (3, "losses")),
        (3, {2: ("losses",), 1: ("losses", BIAS)}, (1, BIAS)),
        (3, {2: NAMES}, (2, WEIGHT)),  # in network order, which is not the alphabet's
        (2, {2: ("losses",)}, (2, "losses")),  # before unequal lengths
    ],
)
def test_first_step_then_first_tensor(
    tmp_path: Path,
    steps: int,
    changed: dict[int, tuple[str, ...]],
    expected: tuple[int, str] | None,
) -> None:
    run, other = digests(tmp_path / "a", 3), digests(tmp_path / "b", steps, changed)
    first = FirstDifference(*expected) if expected else None
    assert first_difference(run, other) == first_difference(other, run) == first


def test_unequal_lengths_steps_and_tensors(tmp_path: Path) -> None:
    run = digests(tmp_path / "a", 3)
    with pytest.raises(RunError, match=r"has 3 steps, .* has 2"):
        first_difference(run, digests(tmp_path / "b", 2))
    other = digests(tmp_path / "c", 0)
    for row in ({"step": 2, "tensors": {}}, {"step": 1, "tensors": {"another": "x"}}):
        (other / "digests.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(RunError, match="did not train the same tensors at the same steps"):
            first_difference(run, other)


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
