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
TIMES = {"compute_s": 0.1, "exposed_communication_s": 0.02, "data_s": 0.01, "update_s": 0.005}


def row(step: int, processor_s: float | None = None, **parts: float) -> dict[str, Any]:
    times = TIMES | parts
    known = {} if processor_s is None else {"processor_s": processor_s}
    return {"step": step, **times, "exchange_s": 0.05, "step_s": sum(times.values()), **known}


def band(step_s: float) -> dict[str, float]:
    return {"step_s": step_s, "step_low_s": 0.9 * step_s, "step_high_s": 1.1 * step_s}


def forecast(**said: float) -> dict[str, Any]:
    parts = TIMES | said
    sides = {
        side: {name: factor * value for name, value in parts.items()}
        for side, factor in (("low", 0.9), ("high", 1.1))
    }
    return parts | sides | band(sum(parts.values())) | {"stragglers_s": 0.0, "cluster": "made up"}


def run(folder: Path, said: dict[str, Any], *ranks: dict[str, float]) -> Score:
    for rank, parts in enumerate(ranks):
        rows = [row(step + 1, **parts) for step in range(STEPS)]
        for step, line in enumerate(rows):
            line["compute_s"] += 0.0001 * (step % 7)
        write_rows(folder, {f"rank-{rank}": rows})
    (folder / "forecast.json").write_text(json.dumps(said))
    return of_every_step(folder)


def of_every_step(folder: Path) -> Score:
    scored = score(folder, read_timings(folder), explain(folder))
    assert scored is not None
    return scored


def test_a_wrong_forecast_is_told_from_a_good_one_and_from_a_slow_rank(tmp_path: Path) -> None:
    good = run(tmp_path / "good", forecast(), {}, {})
    assert not good.step.is_outside
    assert "inside the band" in good.lines[0]
    assert not any("wrong" in line for line in good.lines)
    wrong = run(tmp_path / "wrong", forecast(compute_s=0.05), {}, {}, {})
    assert any("compute: forecast" in line and "itself was wrong" in line for line in wrong.lines)
    # Three of four ranks take 100 ms where 50 were forecast; the fourth takes 110.
    waits = {"exposed_communication_s": 0.03}
    ranks = waits, waits, waits, {"compute_s": 0.11}
    lines = run(tmp_path / "slow", forecast(compute_s=0.05), *ranks).lines
    (said,) = [line for line in lines if line.startswith("compute:")]
    assert "rank 3" not in said


def test_what_is_late_in_one_step_and_early_in_the_next_counts_once() -> None:
    """Ranks that take 100 and 120 ms in turns, never both the same, keep a pace of 110."""
    timings = {
        rank: [row(step, compute_s=s - 0.035) for step, s in enumerate([0.5, *taken_s])]
        for rank, taken_s in enumerate([[0.1, 0.12] * 10, [0.12, 0.1] * 10])
    }
    assert measured_parts(timings)["step_s"] == pytest.approx(0.11)


def test_waiting_for_a_slow_rank_is_no_exchange(tmp_path: Path) -> None:
    """Rank 2 computes 50 ms longer; the others wait so much longer, and it does not."""
    waits = {"exposed_communication_s": 0.07}
    scored = run(tmp_path, forecast(), waits, waits, {"compute_s": 0.15})
    parts = {part.name: part.measured_s for part in scored.parts}
    assert parts["stragglers_s"] == pytest.approx(0.05, rel=0.05)
    assert parts["exchange_s"] == pytest.approx(0.02)
    worth = [line for line in scored.lines if "without it the run would be" in line]
    assert worth[0].startswith("stragglers takes")


def test_causes_come_by_what_mending_them_would_bring() -> None:
    parts = dict.fromkeys(("compute_s", "stragglers_s", "update_s", "rest_s"), 0.0)
    said = causes({**parts, "data_s": 0.5, "exchange_s": 0.2, "step_s": 1.0})
    assert [line.split()[0] for line in said] == ["data", "exposed"]
    assert "2.0 times as fast" in said[0]
    assert "25.0% faster" in said[1]


def test_a_refined_forecast_is_scored_by_later_steps_and_both_errors_are_named(
    tmp_path: Path,
) -> None:
    """Steps of 135 ms; the first 20, which made it, took 100 ms longer."""
    refined = forecast(compute_s=0.11) | {"made_from": {"first_step": 5, "last_step": 20}}
    said = forecast(compute_s=0.235) | {"refined": refined}
    rows = [row(step + 1, compute_s=0.2 if step < 20 else 0.1) for step in range(STEPS)]
    write_rows(tmp_path, {"rank-0": rows, "rank-1": rows})
    (tmp_path / "forecast.json").write_text(json.dumps(said))
    scored = of_every_step(tmp_path)
    assert (scored.step.measured_s, scored.first_s) == pytest.approx((0.135, 0.27))
    assert scored.lines[1] == "first forecast +100%, refined by measured steps +7%"
    timings = read_timings(tmp_path)
    early = {rank: steps[:20] for rank, steps in timings.items()}  # nothing else to score it by
    by_first = score(tmp_path, early, explain(tmp_path))
    assert by_first is not None
    assert by_first.step.forecast_s == pytest.approx(0.27)
    assert by_first.first_s is None
    refined["made_from"] = {}
    (tmp_path / "forecast.json").write_text(json.dumps(said))
    with pytest.raises(RunError, match=r"refined.made_from: .*missing required field first_step"):
        of_every_step(tmp_path)


@pytest.mark.parametrize(("share", "is_overloaded"), [(0.5, True), (0.97, False)])
def test_an_overloaded_host_is_no_wrong_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float, is_overloaded: bool
) -> None:
    """Ranks had a processor in half of 200 ms, where 100 were forecast."""
    slow = {"compute_s": 0.2, "processor_s": 0.2 * share}
    lines = run(tmp_path, forecast(), slow, slow).lines
    (said,) = [line for line in lines if line.startswith("compute:")]
    assert said.endswith("the host was overloaded") == is_overloaded
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert ("ranks 0, 1 had a processor for 50% of the time" in out) == is_overloaded


MODE_FORECAST: dict[str, Any] = band(0.05) | {
    "mode": "asynchronous", "mode_in_words": "asynchronous", "cluster": "made up", "after_step": 2,
    "staleness": 3.0, "dropped": 0.0, "idle": 0.2, "bytes_per_step": 8e6, "average_s": None,
}  # fmt: skip
CAME_TO = {
    "gradients": 80,
    "dropped": 0,
    "mean_staleness": 3.6,
    "idle_by_rank": {"0": 0.1, "1": 0.2},
    "pulled_bytes_by_learner": {"0": 0, "1": 50e6},
    "pushed_bytes_by_learner": {"0": 0, "1": 30e6},
}
RESULT: dict[str, Any] = {"steps": 12, "resumed_from": "", "synchrony": CAME_TO}


def write_mode(folder: Path, result: dict[str, Any], every: int = 0, **said: Any) -> Path:
    """Two warm steps of 9 s, one of 1 s that is left out, then 60 and 54 ms in turns. result, said:
    what is other than in the tables above. every: an average of 20 ms after so many.
    """
    times = [9.0, 9.0, 1.0, *[0.06, 0.054] * 4, 0.06]
    rows = [
        {"step": step, **dict.fromkeys([*TIMES, "exchange_s"], 0.0), "micro_batches": 4}
        | {"step_s": step_s}
        for step, step_s in enumerate(times, 1)
    ]
    for line in rows[2:]:
        if every and line["step"] % every == 0:
            line |= {"exchange_s": 0.02, "exposed_communication_s": 0.015}
    write_rows(folder, {"rank-0": rows})
    (folder / "forecast.json").write_text(json.dumps(MODE_FORECAST | said))
    (folder / "result.json").write_text(json.dumps(RESULT | result))
    return folder


def scored(folder: Path) -> ModeScore:
    of_mode = score_mode(folder, read_timings(folder))
    assert of_mode is not None
    return of_mode


def figures(of: ModeScore | ParallelScore) -> dict[str, Any]:
    return {figure.name: (figure.forecast, figure.measured) for figure in of.figures}


def test_a_run_with_a_server(tmp_path: Path) -> None:
    of_mode = scored(write_mode(tmp_path, {}))
    assert of_mode.step.measured_s == pytest.approx((5 * 0.06 + 4 * 0.054) / 9)
    assert figures(of_mode) == {
        "staleness": (3.0, 3.6),
        "idle time of a worker": pytest.approx((20, 15)),
        "a step sends": pytest.approx((8, 8)),  # in ten steps
    }
    assert of_mode.lines[0].endswith("measured 57.3 ms, outside the band, the forecast 13% short")
    assert of_mode.lines[1] == "staleness: forecast 3, measured 3.6 (1.20 times)"


def test_what_was_given_up_and_what_a_resumed_run_sent(tmp_path: Path) -> None:
    result = {"synchrony": CAME_TO | {"dropped": 20}, "resumed_from": "other"}
    of_mode = scored(write_mode(tmp_path / "a", result))
    assert figures(of_mode)["given up"] == (0, pytest.approx(20))
    assert "given up: forecast 0 %, measured 20 %" in of_mode.lines
    assert "a step sends" not in figures(of_mode)  # since when?
    nothing = {"steps": 0, "synchrony": CAME_TO | {"gradients": 0, "dropped": 0}}
    of_mode = scored(write_mode(tmp_path / "b", nothing, dropped=0.5, after_step=0))
    assert figures(of_mode)["given up"] == (50, 0)


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
    explained = json.loads(capsys.readouterr().out)
    # Means, for most steps wait for nobody: three of eleven for 15 ms.
    waits = explained["ranks"][0]["parts_s"]["exposed_communication_s"]
    assert waits == pytest.approx(3 * 0.015 / 11)


PARALLEL_FORECAST: dict[str, Any] = {
    "parallel": {"stages": []}, "cluster": "made up", "step_s": 0.1, "step_low_s": 0.08,
    "step_high_s": 0.12, "compute_s": 0.06, "stragglers_s": 0.01, "activations_s": 0.02,
    "exposed_communication_s": 0.015, "update_s": 0.004, "idle": 0.3,
}  # fmt: skip
SPLIT = (
    {"compute_s": 0.055, "exposed_communication_s": 0.04, "activations_s": 0.03},
    {"compute_s": 0.045, "exposed_communication_s": 0.05, "activations_s": 0.025},
)
STAGED = (
    {"compute_s": 0.08, "exposed_communication_s": 0.02, "idle_s": 0.02},
    {"compute_s": 0.04, "exposed_communication_s": 0.06, "idle_s": 0.06},
)


def write_parallel(
    folder: Path, by_rank: tuple[dict[str, float], ...], stages: tuple[str, ...] = ()
) -> Path:
    """A first step of 9 s, then three of 110 and 105 ms."""
    rest = {"data_s": 0.001, "exchange_s": 0.05, "update_s": 0.005, "micro_batches": 4}
    for rank, words in enumerate(by_rank):
        times = [9.0, *[0.11 - 0.005 * rank] * 3]
        rows = [{"step": at, "step_s": s, **rest, **words} for at, s in enumerate(times, 1)]
        write_rows(folder, {f"rank-{rank}": rows})
    said = PARALLEL_FORECAST | {"parallel": {"stages": stages}}
    (folder / "forecast.json").write_text(json.dumps(said))
    return folder


def scored_parallel(folder: Path) -> ParallelScore:
    of_parts = score_parallel(folder, read_timings(folder))
    assert of_parts is not None
    return of_parts


def test_a_split_network_by_what_is_waited_for(tmp_path: Path) -> None:
    of_parts = scored_parallel(write_parallel(tmp_path, SPLIT))
    assert (of_parts.step.forecast_s, of_parts.step.measured_s) == (0.1, 0.11)
    assert figures(of_parts) == {
        "compute": pytest.approx((50, 50)),  # the median rank's, without waiting for who is late
        "waits for activations": pytest.approx((20, 25)),  # of the rank that waits least
        "waits for gradients": pytest.approx((15, 10)),
        "update": pytest.approx((4, 5)),
    }


def test_stages_by_what_they_do_not_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_parallel(tmp_path, STAGED, stages=("b",))
    assert figures(scored_parallel(run)) == {
        "compute of the slowest stage": pytest.approx((50, 80)),
        "a stage does not compute": pytest.approx((30, 100 * (1 - 12 / 21.5))),
    }
    assert main(["explain", str(run)]) == 0
    out = capsys.readouterr().out
    assert "measured 110.0 ms, inside the band, the forecast 9% short" in out
    assert "a stage does not compute: forecast 30 %" in out


def test_without_an_end_or_a_forecast_of_its_kind(tmp_path: Path) -> None:
    write_mode(tmp_path, {})
    (tmp_path / "result.json").unlink()
    assert (len(scored(tmp_path).lines), figures(scored(tmp_path))) == (1, {})
    rows, explained = read_timings(tmp_path), explain(tmp_path)
    assert score_mode(tmp_path, {0: rows[0][:3]}) is None  # nothing but warm ones
    with pytest.raises(RunError, match="no step"):
        measured_parts({0: [row(1)], 1: [row(1)]})
    forecasts = {"mode": MODE_FORECAST, "parallel": PARALLEL_FORECAST, "step": forecast(), "": None}
    for kind, said in forecasts.items():
        (tmp_path / "forecast.json").unlink()
        if said is not None:
            (tmp_path / "forecast.json").write_text(json.dumps(said))
        assert kind == "step" or score(tmp_path, rows, explained) is None
        assert kind == "mode" or score_mode(tmp_path, rows) is None
        assert kind == "parallel" or score_parallel(tmp_path, rows) is None


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def test_damage_is_named(tmp_path: Path) -> None:
    """In forecasts, in results, and in timings."""
    run(tmp_path, forecast(), {})
    timings, explained = read_timings(tmp_path), explain(tmp_path)
    for said, word, scorer in (
        ({}, "cluster", lambda: score(tmp_path, timings, explained)),
        ({"mode": "stale"}, "cluster", lambda: score_mode(tmp_path, timings)),
        (
            without(PARALLEL_FORECAST, "activations_s"),
            "activations_s",
            lambda: score_parallel(tmp_path, timings),
        ),
    ):
        (tmp_path / "forecast.json").write_text(json.dumps(said))
        with pytest.raises(RunError, match=rf"forecast.json: .*missing required field {word}"):
            scorer()
    for synchrony, text in (
        (None, r"\$.synchrony: expected object, got null"),
        (CAME_TO | {"idle_by_rank": {}}, "synchrony.idle_by_rank: expected object of length >= 1"),
    ):
        with pytest.raises(RunError, match=rf"result.json: .*{text}"):
            scored(write_mode(tmp_path / "mode", {"synchrony": synchrony}))
    bare = without(SPLIT[0], "activations_s")
    with pytest.raises(RunError, match=r"other: its timings: .*\[0\].*field activations_s"):
        scored_parallel(write_parallel(tmp_path / "other", (bare, SPLIT[1])))
