"""A forecast scored against timings that are made for it: of every step, of other modes, of a split
network, and of one in stages.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.score import (
    ModeScore,
    ParallelScore,
    Score,
    causes,
    measured_parts,
    score,
    score_mode,
    score_parallel,
)
from tests.unit.runs.test_explain import write_rows

STEPS = 80


def row(step: int, **parts: float) -> dict[str, Any]:
    times = {"data_s": 0.01, "compute_s": 0.1, "exposed_communication_s": 0.02, "update_s": 0.005}
    processor = {name: parts.pop(name) for name in [*parts] if name == "processor_s"}
    times |= parts
    step_s = sum(times.values())
    return {"step": step, **times, "exchange_s": 0.05, "step_s": step_s, **processor}


def forecast(**said: float) -> dict[str, Any]:
    parts = {"compute_s": 0.1, "exposed_communication_s": 0.02, "data_s": 0.01, "update_s": 0.005}
    parts |= said
    low = {name: 0.9 * value for name, value in parts.items()}
    high = {name: 1.1 * value for name, value in parts.items()}
    step_s = sum(parts.values())
    return {
        **parts,
        "low": low,
        "high": high,
        "step_s": step_s,
        "step_low_s": 0.9 * step_s,
        "step_high_s": 1.1 * step_s,
        "stragglers_s": 0.0,
        "cluster": "made up",
    }


def run(folder: Path, said: dict[str, Any], *ranks: dict[str, float]) -> Score:
    for rank, parts in enumerate(ranks):
        rows = [row(step + 1, **parts) for step in range(STEPS)]
        for step, each in enumerate(rows):
            each["compute_s"] += 0.0001 * (step % 7)
        write_rows(folder, {f"rank-{rank}": rows})
    (folder / "forecast.json").write_text(json.dumps(said))
    found = score(folder, read_timings(folder), explain(folder))
    assert found is not None
    return found


def test_a_wrong_forecast_is_told_from_a_good_one_and_from_a_slow_rank(tmp_path: Path) -> None:
    good = run(tmp_path / "good", forecast(), {}, {})
    assert not good.step.is_outside
    assert "inside the band" in good.lines[0]
    assert not any("wrong" in line for line in good.lines)
    found = run(tmp_path / "wrong", forecast(compute_s=0.05), {}, {}, {})
    assert any("compute: forecast" in each and "itself was wrong" in each for each in found.lines)


def test_what_is_late_in_one_step_and_early_in_the_next_counts_once() -> None:
    """Ranks that take 100 and 120 ms in turns, never both the same, keep a pace of 110."""
    taken_s = [[0.1, 0.12] * 10, [0.12, 0.1] * 10]
    timings = {
        rank: [row(step, compute_s=each - 0.035) for step, each in enumerate([0.5, *own])]
        for rank, own in enumerate(taken_s)
    }
    assert measured_parts(timings)["step_s"] == pytest.approx(0.11)


def test_no_rank_is_blamed_for_what_one_rank_cannot_move(tmp_path: Path) -> None:
    """Three of four ranks take 100 ms where 50 were forecast; the fourth takes 110."""
    waits = {"exposed_communication_s": 0.03}
    found = run(tmp_path, forecast(compute_s=0.05), waits, waits, waits, {"compute_s": 0.11})
    (said,) = [line for line in found.lines if line.startswith("compute:")]
    assert "rank 3" not in said


def test_waiting_for_a_slow_rank_is_no_exchange(tmp_path: Path) -> None:
    """Rank 2 computes 50 ms longer; the others wait so much longer, and it does not."""
    waits = {"exposed_communication_s": 0.07}
    found = run(tmp_path, forecast(), waits, waits, {"compute_s": 0.15})
    parts = {part.name: part.measured_s for part in found.parts}
    assert parts["stragglers_s"] == pytest.approx(0.05, rel=0.05)
    assert parts["exchange_s"] == pytest.approx(0.02)
    worth = [line for line in found.lines if "without it the run would be" in line]
    assert worth[0].startswith("stragglers takes")


def test_causes_come_by_what_mending_them_would_bring() -> None:
    parts = dict.fromkeys(("compute_s", "stragglers_s", "update_s", "rest_s"), 0.0)
    said = causes({**parts, "data_s": 0.5, "exchange_s": 0.2, "step_s": 1.0})
    assert [line.split()[0] for line in said] == ["data", "exposed"]
    assert "2.0 times as fast" in said[0]
    assert "25.0% faster" in said[1]


def test_a_run_without_forecast_and_a_damaged_one(tmp_path: Path) -> None:
    run(tmp_path, forecast(), {}, {})
    (tmp_path / "forecast.json").write_text("{}")
    rows = read_timings(tmp_path)
    with pytest.raises(RunError, match=r"forecast.json: .*missing required field cluster"):
        score(tmp_path, rows, explain(tmp_path))
    (tmp_path / "forecast.json").unlink()
    assert score(tmp_path, rows, explain(tmp_path)) is None
    with pytest.raises(RunError, match="no step"):
        measured_parts({0: [row(1)], 1: [row(1)]})


def test_a_refined_forecast_is_scored_by_later_steps_and_both_errors_are_named(
    tmp_path: Path,
) -> None:
    """Steps of 135 ms; the first 20, which made it, took 100 ms longer."""
    made_from = {"first_step": 5, "last_step": 20}
    refined = forecast(compute_s=0.11) | {"made_from": made_from}
    said = forecast(compute_s=0.235) | {"refined": refined}
    rows = [row(step + 1, compute_s=0.2 if step < 20 else 0.1) for step in range(STEPS)]
    write_rows(tmp_path, {"rank-0": rows, "rank-1": rows})
    (tmp_path / "forecast.json").write_text(json.dumps(said))
    timings = read_timings(tmp_path)
    found = score(tmp_path, timings, explain(tmp_path))
    assert found is not None
    assert found.step.measured_s == pytest.approx(0.135)
    assert found.first_s == pytest.approx(0.27)
    assert found.lines[1] == "first forecast +100%, refined by measured steps +7%"
    early = {rank: steps[:20] for rank, steps in timings.items()}  # nothing else to score it by
    found = score(tmp_path, early, explain(tmp_path))
    assert found is not None
    assert found.step.forecast_s == pytest.approx(0.27)
    assert found.first_s is None
    refined["made_from"] = {}
    (tmp_path / "forecast.json").write_text(json.dumps(said))
    with pytest.raises(RunError, match=r"refined.made_from: .*missing required field first_step"):
        score(tmp_path, timings, explain(tmp_path))


def test_an_overloaded_host_is_no_wrong_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks had a processor in half of 200 ms, where 100 were forecast."""
    for share, is_overloaded in ((0.5, True), (0.97, False)):
        folder = tmp_path / str(share)
        slow = {"compute_s": 0.2, "processor_s": 0.2 * share}
        found = run(folder, forecast(), slow, slow)
        (said,) = [line for line in found.lines if line.startswith("compute:")]
        assert said.endswith("the host was overloaded") == is_overloaded
        assert main(["explain", str(folder)]) == 0
        told = capsys.readouterr().out
        assert ("ranks 0, 1 had a processor for 50% of the time" in told) == is_overloaded


MODE_FORECAST: dict[str, Any] = {
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


def write_mode(
    folder: Path, result: dict[str, Any] | None = None, every: int = 0, **said: Any
) -> Path:
    """Two warm steps of 9 s, one of 1 s that is left out, then 60 and 54 ms in turns. result, said:
    what is other than in the tables above. every: an average of 20 ms after so many.
    """
    times = [9.0, 9.0, 1.0, *[0.06, 0.054] * 4, 0.06]
    rows = [
        {"step": step, **dict.fromkeys(PARTS, 0.0), "micro_batches": 4, "step_s": step_s}
        for step, step_s in enumerate(times, 1)
    ]
    for row in rows[2:]:
        if every and row["step"] % every == 0:
            row |= {"exchange_s": 0.02, "exposed_communication_s": 0.015}
    write_rows(folder, {"rank-0": rows})
    (folder / "forecast.json").write_text(json.dumps(MODE_FORECAST | said))
    (folder / "result.json").write_text(json.dumps(RESULT | (result or {})))
    return folder


def scored(folder: Path) -> ModeScore:
    found = score_mode(folder, read_timings(folder))
    assert found is not None
    return found


def test_a_run_with_a_server(tmp_path: Path) -> None:
    found = scored(write_mode(tmp_path))
    assert found.step.measured_s == pytest.approx((5 * 0.06 + 4 * 0.054) / 9)
    assert {each.name: (each.forecast, each.measured) for each in found.figures} == {
        "staleness": (3.0, 3.6),
        "idle time of a worker": (pytest.approx(20), pytest.approx(15)),
        "a step sends": (8.0, pytest.approx(8)),  # in ten steps
    }
    assert found.lines[0].endswith("measured 57.3 ms, outside the band, the forecast 13% short")
    assert found.lines[1] == "staleness: forecast 3, measured 3.6 (1.20 times)"
    rows = read_timings(tmp_path)
    assert score(tmp_path, rows, explain(tmp_path)) is None  # it is of another kind


def test_what_was_given_up_and_what_a_resumed_run_sent(tmp_path: Path) -> None:
    result = {"synchrony": CAME_TO | {"dropped": 20}, "resumed_from": "other"}
    found = scored(write_mode(tmp_path, result))
    figures = {each.name: each for each in found.figures}
    assert figures["given up"].measured == pytest.approx(20)
    assert figures["given up"].line == "given up: forecast 0 %, measured 20 %"
    assert "a step sends" not in figures  # since when?


def test_without_an_end_and_with_damage(tmp_path: Path) -> None:
    write_mode(tmp_path / "a")
    (tmp_path / "a/result.json").unlink()
    found = scored(tmp_path / "a")
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
    write_mode(tmp_path / "b", {"synchrony": None})
    with pytest.raises(RunError, match=r"result.json: .*\$.synchrony: expected object, got null"):
        scored(tmp_path / "b")
    write_mode(tmp_path / "c", {"synchrony": CAME_TO | {"idle_by_rank": {}}})
    with pytest.raises(RunError, match=r"synchrony.idle_by_rank: expected object of length >= 1"):
        scored(tmp_path / "c")
    nothing = {"steps": 0, "synchrony": CAME_TO | {"gradients": 0, "dropped": 0}}
    found = scored(write_mode(tmp_path / "d", nothing, dropped=0.5, after_step=0))
    assert {each.name: each.measured for each in found.figures}["given up"] == 0


def test_the_command_explains_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local: Any = {"mode": "local", "mode_in_words": "local, H = 4", "average_s": 0.01}
    synchrony = {"replicas": 8, "averages": 3}
    result = {"synchrony": synchrony, "sent_bytes_per_step_by_rank": [2e6, 3e6]}
    write_mode(tmp_path, result, every=4, **local)
    (tmp_path / "recipe.toml").write_text('[synchrony]\nmode = "local"\n')
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "8 replicas, 3 averages\n" in out
    assert "an average takes at most 20.0 ms, and is waited for at most 15.0 ms\n" in out
    assert "a rank sends 3 MB a step\n" in out
    assert "an average: forecast 10 ms, measured 20 ms (2.00 times)" in out
    assert main(["explain", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert [figure["measured"] for figure in row["score"]["figures"]] == [20]
    # Means, for most steps wait for nobody: three of eleven for 15 ms.
    waits = row["ranks"][0]["parts_s"]["exposed_communication_s"]
    assert waits == pytest.approx(3 * 0.015 / 11)


PARALLEL_FORECAST: dict[str, Any] = {
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


def write_parallel(
    folder: Path, forecast: dict[str, Any], by_rank: tuple[dict[str, float], ...]
) -> Path:
    """A first step of 9 s, then three alike of 110 and 105 ms."""
    rest = {"data_s": 0.001, "exchange_s": 0.05, "update_s": 0.005, "micro_batches": 4}
    for rank, words in enumerate(by_rank):
        times = [9.0, *[0.11 - 0.005 * rank] * 3]
        rows = [{"step": at, "step_s": s, **rest, **words} for at, s in enumerate(times, 1)]
        write_rows(folder, {f"rank-{rank}": rows})
    (folder / "forecast.json").write_text(json.dumps(forecast))
    return folder


def scored_parallel(folder: Path) -> ParallelScore:
    timings = read_timings(folder)
    assert score(folder, timings, explain(folder)) is None
    found = score_parallel(folder, timings)
    assert found is not None
    return found


def test_a_split_network_by_what_is_waited_for(tmp_path: Path) -> None:
    found = scored_parallel(write_parallel(tmp_path / "run", PARALLEL_FORECAST, SPLIT))
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
    run = write_parallel(
        tmp_path / "run", PARALLEL_FORECAST | {"parallel": {"stages": ["b"]}}, STAGED
    )
    slowest, idle = scored_parallel(run).figures
    assert [slowest.forecast, slowest.measured] == pytest.approx([50, 80])
    assert [idle.forecast, idle.measured] == pytest.approx([30, 100 * (1 - 12 / 21.5)])
    assert main(["explain", str(run)]) == 0
    told = capsys.readouterr().out
    assert "measured 110.0 ms, inside the band, the forecast 9% short" in told
    assert "a stage does not compute: forecast 30 %" in told


def test_a_damaged_forecast_is_named(tmp_path: Path) -> None:
    bare = {name: each for name, each in PARALLEL_FORECAST.items() if name != "activations_s"}
    run = write_parallel(tmp_path / "run", bare, SPLIT)
    with pytest.raises(RunError, match=r"forecast.json: .*missing required field activations_s"):
        scored_parallel(run)
    bare = {name: each for name, each in SPLIT[0].items() if name != "activations_s"}
    run = write_parallel(tmp_path / "other", PARALLEL_FORECAST, (bare, SPLIT[1]))
    with pytest.raises(RunError, match=r"other: its timings: .*\[0\].*field activations_s"):
        scored_parallel(run)
