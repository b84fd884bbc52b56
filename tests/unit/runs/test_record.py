"""Records of a run that goes on: JSON lines and TensorBoard curves; and where two runs first
differ.
"""

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
from firecaffe.errors import RunError
from firecaffe.runs.record import JsonLines, Metrics
from firecaffe.runs.run_folder import FirstDifference, first_difference
from firecaffe.schema import read_rows


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
    first = len(json.dumps(rows[0])) + 1
    for length in range(len(text) + 1):
        (tmp_path / "a.jsonl").write_text(text[:length])
        whole = 2 if length == len(text) else int(length >= first)
        assert list(read_rows(tmp_path / "a.jsonl", dict)) == rows[:whole]


def curves_in(folder: Path) -> Any:
    curves = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    return curves


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in curves_in(folder).Scalars("train/loss")]


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
    assert losses(tmp_path) == [(1, 0.5), (2, 0.25)]
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
    assert losses(tmp_path) == [(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]


def test_metrics_are_curves_as_well(tmp_path: Path) -> None:
    with Metrics(tmp_path, tensorboard=True) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, {"loss": 1 / step, "samples": 8})
        metrics.write("test", 3, {"top1": 0.5})
        assert len(list(read_rows(tmp_path / "metrics.jsonl", dict))) == 4
    names = sorted(curves_in(tmp_path).Tags()["scalars"])
    assert names == ["test/top1", "train/loss", "train/samples"]
    assert losses(tmp_path) == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    last = {"kind": "test", "step": 3, "top1": 0.5}
    assert list(read_rows(tmp_path / "metrics.jsonl", dict))[-1] == last
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
        (3, {3: ("losses",)}, FirstDifference(3, "losses")),
        (3, {2: ("losses",), 1: ("losses", BIAS)}, FirstDifference(1, BIAS)),
        # In network order, which is not the alphabet's.
        (3, {2: NAMES}, FirstDifference(2, WEIGHT)),
        (2, {2: ("losses",)}, FirstDifference(2, "losses")),  # before unequal lengths
    ],
)
def test_first_step_then_first_tensor(
    tmp_path: Path,
    steps: int,
    changed: dict[int, tuple[str, ...]],
    expected: FirstDifference | None,
) -> None:
    run, other = digests(tmp_path / "a", 3), digests(tmp_path / "b", steps, changed)
    assert first_difference(run, other) == expected
    assert first_difference(other, run) == expected


def test_unequal_lengths(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has 3 steps, .* has 2"):
        first_difference(digests(tmp_path / "a", 3), digests(tmp_path / "b", 2))


@pytest.mark.parametrize(
    "row", [{"step": 2, "tensors": {}}, {"step": 1, "tensors": {"another": "x"}}]
)
def test_other_steps_or_tensors(tmp_path: Path, row: dict[str, object]) -> None:
    other = digests(tmp_path / "b", 0)
    (other / "digests.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(RunError, match="did not train the same tensors at the same steps"):
        first_difference(digests(tmp_path / "a", 1), other)
