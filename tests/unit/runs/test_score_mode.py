"""A forecast of another mode than every_step, against records that are made for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.score import ModeScore, score, score_mode

FORECAST = {
    "mode": "asynchronous",
    "mode_in_words": "asynchronous",
    "cluster": "made up",
    "after_step": 2,
    "step_s": 0.05,
    "step_low_s": 0.045,
    "step_high_s": 0.055,
    "staleness": 3.0,
    "dropped": 0.0,
    "idle": 0.2,
    "bytes_per_step": 8e6,
    "average_s": None,
}
CAME_TO = {
    "gradients": 80,
    "dropped": 0,
    "mean_staleness": 3.6,
    "idle_by_rank": {"0": 0.1, "1": 0.2},
    "pulled_bytes_by_learner": {"0": 0, "1": 50e6},
    "pushed_bytes_by_learner": {"0": 0, "1": 30e6},
}
RESULT: dict[str, Any] = {"steps": 12, "resumed_from": "", "synchrony": CAME_TO}
PARTS = ("data_s", "compute_s", "exposed_communication_s", "exchange_s", "update_s")


def write(
    folder: Path, forecast: dict[str, Any], result: dict[str, Any] | None, every: int = 0
) -> Path:
    """Two warm steps of 9 s, one of 1 s that is left out, then 60 and 54 ms in turns. every: an
    average of 20 ms after so many.
    """
    (folder / "timings").mkdir(parents=True)
    times = [9.0, 9.0, 1.0, *[0.06, 0.054] * 4, 0.06]
    rows = [
        {"step": step, **dict.fromkeys(PARTS, 0.0), "micro_batches": 4, "step_s": step_s}
        for step, step_s in enumerate(times, 1)
    ]
    for row in rows[2:]:
        if every and row["step"] % every == 0:
            row |= {"exchange_s": 0.02, "exposed_communication_s": 0.015}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "timings/rank-0.jsonl").write_text(text)
    (folder / "forecast.json").write_text(json.dumps(forecast))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def scored(folder: Path) -> ModeScore:
    found = score_mode(folder, read_timings(folder))
    assert found is not None
    return found


MEAN_S = (5 * 0.06 + 4 * 0.054) / 9


def test_a_run_with_a_server(tmp_path: Path) -> None:
    found = scored(write(tmp_path, FORECAST, RESULT))
    assert found.step.measured_s == pytest.approx(MEAN_S)
    assert {each.name: (each.forecast, each.measured) for each in found.figures} == {
        "staleness": (3.0, 3.6),
        "idle time of a worker": (pytest.approx(20), pytest.approx(15)),
        "a step sends": (8.0, pytest.approx(8)),  # in ten steps
    }
    assert found.lines[0] == (
        "forecast for made up in mode asynchronous: 50.0 ms a step (45.0 ms to 55.0 ms); measured "
        "57.3 ms, outside the band, the forecast 13% short"
    )
    assert found.lines[1] == "staleness: forecast 3, measured 3.6 (1.20 times)"
    rows = read_timings(tmp_path)
    assert score(tmp_path, rows, explain(tmp_path)) is None  # it is of another kind


def test_what_was_given_up_and_what_a_resumed_run_sent(tmp_path: Path) -> None:
    came_to = {**CAME_TO, "dropped": 20}
    result = {**RESULT, "synchrony": came_to, "resumed_from": "other"}
    figures = {each.name: each for each in scored(write(tmp_path, FORECAST, result)).figures}
    assert figures["given up"].measured == pytest.approx(20)
    assert figures["given up"].line == "given up: forecast 0 %, measured 20 %"
    assert "a step sends" not in figures  # since when?


def test_replicas(tmp_path: Path) -> None:
    forecast = {**FORECAST, "mode": "local", "mode_in_words": "local, H = 4", "average_s": 0.01}
    found = scored(write(tmp_path, forecast, {**RESULT, "synchrony": {"averages": 3}}, every=4))
    assert [each.line for each in found.figures] == [
        "an average: forecast 10 ms, measured 20 ms (2.00 times)"
    ]


def test_without_an_end_and_with_damage(tmp_path: Path) -> None:
    found = scored(write(tmp_path / "a", FORECAST, None))
    assert (len(found.lines), found.figures) == (1, [])
    rows = read_timings(tmp_path / "a")
    assert score_mode(tmp_path / "a", {0: rows[0][:3]}) is None  # nothing but warm ones
    (tmp_path / "a/forecast.json").write_text('{"mode": "stale"}')
    with pytest.raises(RunError, match=r"forecast.json: .*missing required field cluster"):
        score_mode(tmp_path / "a", rows)
    (tmp_path / "a/forecast.json").write_text("{}")
    assert score_mode(tmp_path / "a", rows) is None
    (tmp_path / "a/forecast.json").unlink()
    assert score_mode(tmp_path / "a", rows) is None
    write(tmp_path / "b", FORECAST, {**RESULT, "synchrony": None})
    with pytest.raises(RunError, match=r"result.json: .*\$.synchrony: expected object, got null"):
        scored(tmp_path / "b")
    write(tmp_path / "c", FORECAST, {**RESULT, "synchrony": {**CAME_TO, "idle_by_rank": {}}})
    with pytest.raises(RunError, match=r"synchrony.idle_by_rank: expected object of length >= 1"):
        scored(tmp_path / "c")
    nothing = {**CAME_TO, "gradients": 0, "dropped": 0}
    forecast = {**FORECAST, "dropped": 0.5, "after_step": 0}
    found = scored(write(tmp_path / "d", forecast, {**RESULT, "steps": 0, "synchrony": nothing}))
    assert {each.name: each.measured for each in found.figures}["given up"] == 0


def test_the_command_explains_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forecast = {**FORECAST, "mode": "local", "mode_in_words": "local, H = 4", "average_s": 0.01}
    synchrony = {"replicas": 8, "averages": 3}
    result = {**RESULT, "synchrony": synchrony, "sent_bytes_per_step_by_rank": [2e6, 3e6]}
    write(tmp_path, forecast, result, every=4)
    (tmp_path / "recipe.toml").write_text('[synchrony]\nmode = "local"\n')
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "8 replicas, 3 averages\n" in out
    assert "an average takes at most 20.0 ms, and is waited for at most 15.0 ms\n" in out
    assert "a rank sends 3 MB a step\n" in out
    assert "an average: forecast 10 ms" in out
    assert main(["explain", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["score"]["figures"][0]["measured"] == 20
    # Means, for most steps wait for nobody: three of eleven for 15 ms.
    waits = row["ranks"][0]["parts_s"]["exposed_communication_s"]
    assert waits == pytest.approx(3 * 0.015 / 11)
