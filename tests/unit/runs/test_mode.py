"""Modes of synchrony as rows of a comparison."""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main
from firecaffe.runs.curves import (
    curves_of,
    given_up,
    mode_of,
    sent_per_step,
    staleness_of,
    trained_samples,
)
from firecaffe.runs.run_table import TableRun
from tests.unit.runs.test_compare import planted
from tests.unit.runs.test_curves import train, with_metrics
from tests.unit.runs.test_groups import over_seeds, rows_of, shown

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
    config = {"clock": "real", "warm_steps": 0, **MODES[mode], **more}
    return {
        "recipe__synchrony": config,
        "recipe__train__micro_batch_size": 8,
        "result__sent_bytes_per_step_by_rank": [1e6, 2e6],
        "result__test_loss": 0.25,
    }


def served(mode: str, **more: Any) -> dict[str, Any]:
    return {**words(mode, **more), "result__synchrony": ROW}


def test_what_a_run_says_of_its_mode(tmp_path: Path) -> None:
    for place, mode in enumerate(MODES):
        assert mode_of(planted(tmp_path / str(place), **words(mode))) == mode
    assert mode_of(planted(tmp_path / "old")) == "every_step"
    run = planted(tmp_path / "a", **served("stale, s = 4", warm_steps=80))
    assert staleness_of(run) == 2.5
    assert given_up(run) == 200 * 8
    assert trained_samples(run) == 400 * 64 - 200 * 8
    assert sent_per_step(run) == pytest.approx(8e8 / 320)  # of what is after the warm steps
    plain = planted(tmp_path / "b", **words("local, H = 8"))
    assert (staleness_of(plain), given_up(plain), sent_per_step(plain)) == (None, 0, 3e6)


def test_bytes_that_a_run_with_a_server_does_not_know(tmp_path: Path) -> None:
    """Rank 0's traffic is that of the warm steps."""
    own = served("stale, s = 4")
    resumed = planted(tmp_path / "a", **own, result__resumed_from="elsewhere")
    assert sent_per_step(resumed) is None
    clock = own | {"result__synchrony": {"mean_staleness": 1.0, "dropped": 0}}
    assert sent_per_step(planted(tmp_path / "b", **clock)) is None
    nothing = own | {"result__synchrony": {}}
    assert staleness_of(planted(tmp_path / "c", **nothing)) is None


def test_curves_are_against_what_went_over_the_lanes(tmp_path: Path) -> None:
    run = with_metrics(tmp_path / "a", [train(1)], **served("asynchronous, c = 3"))
    assert curves_of(run).loss[0].sent_bytes == pytest.approx(2e6)


def groups(tmp_path: Path, mode: str, **changes: Any) -> list[TableRun]:
    plain = over_seeds(tmp_path / "a", [0.900, 0.901, 0.902], **words("every_step"))
    other = {**served(mode), **changes}
    return [*plain, *over_seeds(tmp_path / "b", [0.901, 0.900, 0.902], **other)]


def test_modes_are_rows(tmp_path: Path) -> None:
    rows, _ = rows_of(groups(tmp_path, "backup, b = 2"))
    assert [row.mode for row in rows] == ["every_step", "backup, b = 2"]
    assert [row.staleness and row.staleness.value for row in rows] == [None, 2.5]
    assert [row.given_up for row in rows] == [0, pytest.approx(1600 / 25600)]
    assert [row.sent_bytes for row in rows] == [3e6 * 400, pytest.approx(8e8)]
    # The rate is of samples that count.
    assert [row.time_s.value for row in rows] == pytest.approx([25.6, 24])
    assert rows[1].against is not None
    text = shown(groups(tmp_path / "again", "backup, b = 2"))
    _, header, *lines = text.splitlines()
    assert header.split()[-7:] == ["mode", "test", "loss", "staleness", "given", "up", "sent"]
    first = next(line for line in lines if line.startswith("A"))
    assert first.split()[-8:] == ["every_step", "0.25", "±", "0", "-", "0.0%", "1,200", "MB"]


def test_no_column_without_a_mode(tmp_path: Path) -> None:
    plain = over_seeds(tmp_path / "a", [0.9, 0.91])
    other = over_seeds(tmp_path / "b", [0.9, 0.91], **words("every_step"))
    assert "staleness" not in shown([*plain, *other])
    assert "mode" not in shown([*plain, *other]).splitlines()[1]
    local = over_seeds(tmp_path / "c", [0.9, 0.91], **words("local, H = 8"))
    header = shown([*plain, *local]).splitlines()[1]
    assert "mode" in header
    assert "staleness" not in header
    assert "given up" not in header


def test_a_simulated_clock_has_no_speedup(tmp_path: Path) -> None:
    plain = groups(tmp_path, "stale, s = 4")[:3]
    simulated = served("stale, s = 4", clock="simulated")
    runs = [*plain, *over_seeds(tmp_path / "c", [0.9, 0.9, 0.9], **simulated)]
    assert "B: no speedup over A: B ran under the simulated clock, in one process" in shown(runs)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(run.folder) for run in groups(tmp_path, "asynchronous, c = 3")]
    assert main(["compare", *folders, "--by", "recipe", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["groups"]
    assert (first["staleness"], second["staleness"]["value"]) == (None, 2.5)
    assert second["test_loss"]["value"] == 0.25
    assert main(["compare", *folders, "--by", "recipe"]) == 0
    out = capsys.readouterr().out
    assert "synchrony.mode: A every_step, B asynchronous" in out
    assert "2.5 ± 0" in out
