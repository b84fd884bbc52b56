"""The forecast of a split network, and of one in stages, against records that are made for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.score import ParallelScore, score, score_parallel

FORECAST: dict[str, Any] = {
    "parallel": {"stages": []},
    "cluster": "made up",
    "step_s": 0.1,
    "step_low_s": 0.08,
    "step_high_s": 0.12,
    "compute_s": 0.06,
    "stragglers_s": 0.01,
    "activations_s": 0.02,
    "exposed_communication_s": 0.015,
    "update_s": 0.004,
    "idle": 0.3,
}
SPLIT = (
    {"compute_s": 0.055, "exposed_communication_s": 0.04, "activations_s": 0.03},
    {"compute_s": 0.045, "exposed_communication_s": 0.05, "activations_s": 0.025},
)
STAGED = (
    {"compute_s": 0.08, "exposed_communication_s": 0.02, "idle_s": 0.02},
    {"compute_s": 0.04, "exposed_communication_s": 0.06, "idle_s": 0.06},
)


def write(folder: Path, forecast: dict[str, Any], by_rank: tuple[dict[str, float], ...]) -> Path:
    """A first step of 9 s, then three alike of 110 and 105 ms."""
    (folder / "timings").mkdir(parents=True)
    rest = {"data_s": 0.001, "exchange_s": 0.05, "update_s": 0.005, "micro_batches": 4}
    for rank, words in enumerate(by_rank):
        times = [9.0, *[0.11 - 0.005 * rank] * 3]
        rows = [{"step": at, "step_s": s, **rest, **words} for at, s in enumerate(times, 1)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"timings/rank-{rank}.jsonl").write_text(text)
    (folder / "forecast.json").write_text(json.dumps(forecast))
    return folder


def of(folder: Path) -> ParallelScore:
    timings = read_timings(folder)
    assert score(folder, timings, explain(folder)) is None
    found = score_parallel(folder, timings)
    assert found is not None
    return found


def test_a_split_network_by_what_is_waited_for(tmp_path: Path) -> None:
    found = of(write(tmp_path / "run", FORECAST, SPLIT))
    assert (found.step.forecast_s, found.step.measured_s) == (0.1, 0.11)
    figures = {each.name: (each.forecast, each.measured) for each in found.figures}
    assert figures == {
        "compute": pytest.approx((50, 50)),  # the median rank's, without waiting for who is late
        "waits for activations": pytest.approx((20, 25)),  # of the rank that waits least
        "waits for gradients": pytest.approx((15, 10)),
        "update": pytest.approx((4, 5)),
    }


def test_stages_by_what_they_do_not_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", FORECAST | {"parallel": {"stages": ["b"]}}, STAGED)
    slowest, idle = of(run).figures
    assert [slowest.forecast, slowest.measured] == pytest.approx([50, 80])
    assert [idle.forecast, idle.measured] == pytest.approx([30, 100 * (1 - 12 / 21.5)])
    assert main(["explain", str(run)]) == 0
    told = capsys.readouterr().out
    assert "measured 110.0 ms, inside the band, the forecast 9% short" in told
    assert "a stage does not compute: forecast 30 %" in told


def test_a_damaged_forecast_is_named(tmp_path: Path) -> None:
    bare = {name: each for name, each in FORECAST.items() if name != "activations_s"}
    run = write(tmp_path / "run", bare, SPLIT)
    with pytest.raises(RunError, match=r"forecast.json: .*missing required field activations_s"):
        of(run)
    bare = {name: each for name, each in SPLIT[0].items() if name != "activations_s"}
    run = write(tmp_path / "other", FORECAST, (bare, SPLIT[1]))
    with pytest.raises(RunError, match=r"other: its timings: .*\[0\].*field activations_s"):
        of(run)
