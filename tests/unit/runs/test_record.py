"""Records of a run that goes on: JSON lines and TensorBoard curves."""

import errno
import json
import math
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

from firecaffe import files
from firecaffe.runs.record import JsonLines, Metrics
from firecaffe.schema import read_rows


def test_rows_come_back(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": math.inf, "text": 'a "b"\n ü'},
    ]
    with JsonLines(tmp_path / "a.jsonl") as lines:
        for row in rows:
            lines.write(row)
    rows[1]["loss"] = None  # JSON has no infinity
    assert list(read_rows(tmp_path / "a.jsonl", dict)) == rows
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == len(rows)


def test_floats_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308]
    with JsonLines(tmp_path / "a.jsonl") as lines:
        lines.write({"values": values})
    assert list(read_rows(tmp_path / "a.jsonl", dict)) == [{"values": values}]


def test_a_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "a.jsonl") as lines:
        lines.write({"step": 1})
        assert list(read_rows(tmp_path / "a.jsonl", dict)) == [{"step": 1}]


def test_a_record_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(FileExistsError):
        JsonLines(tmp_path / "a.jsonl")


def test_the_file_is_whole_after_an_error(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), JsonLines(tmp_path / "a.jsonl") as lines:
        lines.write({"step": 1})
        raise ZeroDivisionError
    assert list(read_rows(tmp_path / "a.jsonl", dict)) == [{"step": 1}]


def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path) -> None:
    rows = [{"step": 1, "x": "ab"}, {"step": 2, "x": "cd"}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    first = len(json.dumps(rows[0])) + 1
    for length in range(len(text) + 1):
        (tmp_path / "a.jsonl").write_text(text[:length])
        whole = 2 if length == len(text) else int(length >= first)
        assert list(read_rows(tmp_path / "a.jsonl", dict)) == rows[:whole]


class Disk(FileIO):
    is_full = False

    def write(self, data: Any, /) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[:100])  # as much as there is room for


def test_a_full_disk_is_nothing_that_a_thread_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither is a curve lost that had no room when it was drawn."""
    monkeypatch.setattr(files, "FileIO", Disk)
    monkeypatch.setattr(Disk, "is_full", True)
    before = threading.active_count()
    with Metrics(tmp_path, tensorboard=True) as metrics:
        metrics.write("train", 1, {"loss": 0.5})
        assert threading.active_count() == before
        monkeypatch.setattr(Disk, "is_full", False)
        metrics.write("train", 2, {"loss": 0.25})
    curves = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [event.value for event in curves.Scalars("train/loss")] == [0.5, 0.25]
    assert capsys.readouterr().err == ""


def test_bytes_that_had_no_room_are_written_when_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FileIO", Disk)
    monkeypatch.setattr(Disk, "is_full", True)
    file = files.GrowingFile(tmp_path / "a")
    file.write(b"last words")
    monkeypatch.setattr(Disk, "is_full", False)
    file.close()
    file.close()
    assert (tmp_path / "a").read_bytes() == b"last words"


def test_what_a_lost_attempt_has_drawn_goes(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, {"loss": float(step)})
    (first,) = (tmp_path / "tensorboard").iterdir()
    # As of an attempt that began earlier, in another process.
    first.rename(first.with_name(first.name.replace(".tfevents.", ".tfevents.0")))
    with Metrics(tmp_path, tensorboard=True, after_step=1) as metrics:
        for step in (2, 3, 4):
            metrics.write("train", step, {"loss": step + 0.5})
    curves = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    drawn = [(event.step, event.value) for event in curves.Scalars("train/loss")]
    assert drawn == [(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]


def test_metrics_are_curves_as_well(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, {"loss": 1 / step, "samples": 8})
        metrics.write("test", 3, {"top1": 0.5})
        assert len(list(read_rows(tmp_path / "metrics.jsonl", dict))) == 4
    curves = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert sorted(curves.Tags()["scalars"]) == ["test/top1", "train/loss", "train/samples"]
    loss = [(event.step, event.value) for event in curves.Scalars("train/loss")]
    assert loss == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert list(read_rows(tmp_path / "metrics.jsonl", dict))[-1] == {
        "kind": "test",
        "step": 3,
        "top1": 0.5,
    }


def test_no_curves_where_none_are_wanted(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=False) as metrics:
        metrics.write("train", 1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
