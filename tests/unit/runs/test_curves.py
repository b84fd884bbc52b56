"""Curves of planted runs: where each point stands in time, samples and bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.errors import RunError
from firecaffe.runs.curves import MOST_POINTS, Point, curves_of, time_to
from firecaffe.runs.run_table import TableRun
from tests.unit.runs.test_compare import planted


def with_metrics(folder: Path, rows: list[dict[str, Any]], **words: Any) -> TableRun:
    run = planted(folder, **words)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def train(step: int, loss: float | None = 1.0, samples: int = 64) -> dict[str, Any]:
    return {"kind": "train", "step": step, "samples": samples, "images_per_s": 32, "loss": loss}


def test_where_points_stand(tmp_path: Path) -> None:
    rows = [train(1, 3.0), train(2, 2.0, samples=32)]
    rows += [{"kind": "test", "step": 2, "top1": 0.5}, train(3, None)]
    sent = {"result__steps": 3, "result__sent_bytes_per_step_by_rank": [100.0, 50.0]}
    found = curves_of(with_metrics(tmp_path / "a", rows, **sent))
    assert found.loss == [
        Point(2.0, 64, 150.0, 3.0),
        Point(3.0, 96, 300.0, 2.0),
        Point(5.0, 160, 450.0, None),
    ]
    assert found.metric == [Point(3.0, 96, 300.0, 0.5)]


def test_a_run_that_goes_on_with_another_knows_its_samples_not_its_time(tmp_path: Path) -> None:
    rows = [train(11), {"kind": "test", "step": 11, "top1": 0.5}]
    sent = {"result__steps": 11, "result__sent_bytes_per_step_by_rank": [100.0]}
    run = with_metrics(tmp_path / "a", rows, **sent)
    assert curves_of(run).metric == [Point(None, 11 * 64, 1100.0, 0.5)]
    assert time_to(run, 0.4) is None


@pytest.mark.parametrize("by_rank", [[None, None], [100.0, None]])
def test_bytes_that_nobody_knows(tmp_path: Path, by_rank: list[float | None]) -> None:
    run = with_metrics(
        tmp_path / "a", [train(1)], result__steps=1, result__sent_bytes_per_step_by_rank=by_rank
    )
    assert curves_of(run).loss[0].sent_bytes is None


def test_a_long_run_is_thinned_to_means(tmp_path: Path) -> None:
    rows = [train(step, float(step % 2)) for step in range(1, 10 * MOST_POINTS + 1)]
    found = curves_of(with_metrics(tmp_path / "a", rows, result__steps=len(rows))).loss
    assert len(found) == MOST_POINTS
    assert {point.value for point in found} == {0.5}
    assert found[-1].samples == 64 * len(rows)
    run = with_metrics(tmp_path / "b", rows[:-3], result__steps=len(rows))
    assert curves_of(run).loss[-1].samples == 64 * (len(rows) - 3)  # the last, though fewer steps


@pytest.mark.parametrize("text", ["[]\n", '{"kind": "train"}\n', "nonsense\n"])
def test_metrics_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    run = planted(tmp_path / "a")
    (run.folder / "metrics.jsonl").write_text(text)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read"):
        curves_of(run)
