"""Curves of planted runs: where each point stands in time, samples and bytes; and what runs say of
their mode of synchrony, in curves and as rows of a comparison.
"""

from pathlib import Path
from typing import Any

import pytest

from firecaffe.errors import RunError
from firecaffe.runs.curves import (
    MAX_POINTS,
    Point,
    curves_of,
    given_up,
    mode_of,
    sent_per_step,
    staleness_of,
    time_to,
    trained_samples,
)
from firecaffe.runs.run_table import TableRun
from tests.kit.compared_runs import over_seeds, planted, rows_of, train, with_metrics
from tests.unit.runs.test_groups import shown

SENT = "result__sent_bytes_per_step_by_rank"


def test_where_points_stand(tmp_path: Path) -> None:
    test = {"kind": "test", "step": 2, "top1": 0.5}
    rows = [train(1, 3.0), train(2, 2.0, samples=32), test, train(3, None)]
    run = with_metrics(tmp_path / "a", rows, result__steps=3, **{SENT: [100.0, 50.0]})
    curves = curves_of(run)
    points = [(2.0, 64, 150.0, 3.0), (3.0, 96, 300.0, 2.0), (5.0, 160, 450.0, None)]
    assert curves.loss == [Point(*point) for point in points]
    assert curves.metric == [Point(3.0, 96, 300.0, 0.5)]
    for place, by_rank in enumerate(([None, None], [100.0, None])):  # which nobody knows
        run = with_metrics(tmp_path / str(place), rows, result__steps=3, **{SENT: by_rank})
        assert curves_of(run).loss[0].sent_bytes is None


def test_a_run_that_goes_on_with_another_knows_its_samples_not_its_time(tmp_path: Path) -> None:
    rows = [train(11), {"kind": "test", "step": 11, "top1": 0.5}]
    run = with_metrics(tmp_path / "a", rows, result__steps=11, **{SENT: [100.0]})
    assert curves_of(run).metric == [Point(None, 11 * 64, 1100.0, 0.5)]
    assert time_to(run, 0.4) is None


def test_a_long_run_is_thinned_to_means(tmp_path: Path) -> None:
    rows = [train(step, float(step % 2)) for step in range(1, 10 * MAX_POINTS + 1)]
    loss = curves_of(with_metrics(tmp_path / "a", rows, result__steps=len(rows))).loss
    assert (len(loss), loss[-1].samples) == (MAX_POINTS, 64 * len(rows))
    assert {point.value for point in loss} == {0.5}
    run = with_metrics(tmp_path / "b", rows[:-3], result__steps=len(rows))
    assert curves_of(run).loss[-1].samples == 64 * (len(rows) - 3)  # the last, though fewer steps


def test_metrics_that_cannot_be_read(tmp_path: Path) -> None:
    run = planted(tmp_path / "a")
    for text in (None, "[]\n", '{"kind": "train"}\n', "nonsense\n"):
        if text:
            (run.folder / "metrics.jsonl").write_text(text)
        with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read"):
            curves_of(run)


ROW = {
    "gradients": 3000,
    "dropped": 200,
    "mean_staleness": 2.5,
    "pulled_bytes_by_learner": {"0": 0, "1": 3e8},
    "pushed_bytes_by_learner": {"0": 0, "1": 5e8},
}
MODES: dict[str, dict[str, Any]] = {
    "every_step": {"mode": "every_step", "backup_workers": 1},
    "backup, b = 2": {"mode": "backup", "backup_workers": 2},
    "stale, s = 4": {"mode": "stale", "max_staleness": 4},
    "asynchronous, c = 3": {"mode": "asynchronous", "gradients_per_update": 3},
    "local, H = 8": {"mode": "local", "local_steps": 8},
}


def words(mode: str, **more: Any) -> dict[str, Any]:
    return {
        "recipe__synchrony": {"clock": "real", "warm_steps": 0, **MODES[mode], **more},
        "recipe__train__micro_batch_size": 8,
        SENT: [1e6, 2e6],
        "result__test_loss": 0.25,
    }


def served(mode: str, **more: Any) -> dict[str, Any]:
    return {**words(mode, **more), "result__synchrony": ROW}


def test_what_a_run_says_of_its_mode(tmp_path: Path) -> None:
    for place, mode in enumerate(MODES):
        assert mode_of(planted(tmp_path / str(place), **words(mode))) == mode
    assert mode_of(planted(tmp_path / "old")) == "every_step"
    run = with_metrics(tmp_path / "a", [train(1)], **served("stale, s = 4", warm_steps=80))
    assert (staleness_of(run), given_up(run)) == (2.5, 200 * 8)
    assert trained_samples(run) == 400 * 64 - 200 * 8
    assert sent_per_step(run) == pytest.approx(8e8 / 320)  # of what is after the warm steps
    assert curves_of(run).loss[0].sent_bytes == sent_per_step(run)
    plain = planted(tmp_path / "b", **served("local, H = 8"))
    assert (staleness_of(plain), given_up(plain), sent_per_step(plain)) == (None, 0, 3e6)


def test_bytes_that_a_run_with_a_server_does_not_know(tmp_path: Path) -> None:
    """Rank 0's traffic is that of the warm steps."""
    known = served("stale, s = 4")
    resumed = planted(tmp_path / "a", **known, result__resumed_from="elsewhere")
    assert sent_per_step(resumed) is None
    clock = known | {"result__synchrony": {"mean_staleness": 1.0, "dropped": 0}}
    assert sent_per_step(planted(tmp_path / "b", **clock)) is None
    nothing = known | {"result__synchrony": {}}
    assert staleness_of(planted(tmp_path / "c", **nothing)) is None


def groups(folder: Path, mode: str, **more: Any) -> list[TableRun]:
    plain = over_seeds(folder / "a", [0.900, 0.901, 0.902], **words("every_step"))
    return [*plain, *over_seeds(folder / "b", [0.901, 0.900, 0.902], **served(mode, **more))]


def test_modes_are_rows(tmp_path: Path) -> None:
    runs = groups(tmp_path, "backup, b = 2")
    rows, _ = rows_of(runs)
    assert [row.mode for row in rows] == ["every_step", "backup, b = 2"]
    assert [row.staleness and row.staleness.value for row in rows] == [None, 2.5]
    assert [row.given_up for row in rows] == [0, pytest.approx(1600 / 25600)]
    assert [row.sent_bytes for row in rows] == [3e6 * 400, pytest.approx(8e8)]
    # The rate is of samples that count.
    assert [row.time_s.value for row in rows] == pytest.approx([25.6, 24])
    assert rows[1].against is not None
    _, header, *lines = shown(runs).splitlines()
    assert header.split()[-7:] == ["mode", "test", "loss", "staleness", "given", "up", "sent"]
    first = next(line for line in lines if line.startswith("A"))
    assert first.split()[-8:] == ["every_step", "0.25", "±", "0", "-", "0.0%", "1,200", "MB"]


def test_no_column_without_a_mode(tmp_path: Path) -> None:
    plain, other, local = (
        over_seeds(tmp_path / name, [0.9, 0.91], **more)
        for name, more in (("a", {}), ("b", words("every_step")), ("c", words("local, H = 8")))
    )
    for runs, is_shown in ((other, False), (local, True)):
        header = shown([*plain, *runs]).splitlines()[1]
        assert ("mode" in header) == is_shown
        assert "staleness" not in header
        assert "given up" not in header


def test_a_simulated_clock_has_no_speedup(tmp_path: Path) -> None:
    text = shown(groups(tmp_path, "stale, s = 4", clock="simulated"))
    assert "B: no speedup over A: B ran under the simulated clock, in one process" in text
