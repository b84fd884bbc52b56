"""What is told of a run with a server, from records that are made for it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main
from firecaffe.errors import RunError
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.modes import alternatives
from firecaffe.planner.of_recipe import workload_of
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.runs.explain_modes import ServedExplanation, explain_served
from firecaffe.runs.rank_times import ALPHA, read_timings
from tests.unit.runs.test_explain import write_rows

STEPS = 60
CAME_TO = {
    "updates": 90,
    "gradients": 180,
    "dropped": 6,
    "lost_learners": 0,
    "mean_staleness": 1.25,
    "staleness": {"0": 45, "1": 90, "3": 45},
    "time_s": 3.0,
    "idle_by_rank": {"0": 0.1, "1": 0.25, "2": 0.5},
    "rank_by_learner": {"0": 0, "1": 1, "2": 2, "3": 0, "4": 1, "5": 2},
    "pulled_bytes_by_learner": {"0": 0, "1": 10, "2": 20, "3": 0, "4": 1, "5": 2},
    "pushed_bytes_by_learner": {"0": 0, "1": 30, "2": 40, "3": 0, "4": 3, "5": 4},
}


def write(folder: Path, slow: float = 1.0, steps: int = STEPS, warm: int = 3) -> Path:
    """slow: how many times as long rank 2 takes for a micro-batch."""
    noise = random.Random(0)
    rows: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    parts = ("data_s", "compute_s", "exposed_communication_s", "exchange_s", "update_s")
    for step in range(1, warm + 1):
        for own in rows.values():
            own.append({"step": step, **dict.fromkeys(parts, 0.01), "step_s": 9.0})
    for step in range(warm + 1, warm + steps + 1):
        step_s = 0.05 if step > warm + 1 else 5.0  # in which all begin
        row = {"step": step, **dict.fromkeys(parts, 0.0), "update_s": 0.002, "step_s": step_s}
        by_rank = {}
        for rank, times in enumerate((1, 1, slow)):
            if rank < 2 or step % 2:  # rank 2 does not come to bring something in every step
                by_rank[rank] = (2, 2 * 0.01 * times * noise.uniform(0.95, 1.05))
        rows[0].append({**row, "by_rank": by_rank})
    write_rows(folder, {f"rank-{rank}": own for rank, own in rows.items()})
    return folder


def told(folder: Path) -> ServedExplanation:
    found = explain_served(folder, read_timings(folder))
    assert found is not None
    return found


def finish(folder: Path, **changed: Any) -> None:
    (folder / "result.json").write_text(json.dumps({"synchrony": {**CAME_TO, **changed}}))


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    found = told(write(tmp_path, slow=1.5))
    assert [(each.rank, each.cause) for each in found.slow] == [(2, "computes")]
    assert found.slow[0].factor == pytest.approx(1.5, rel=0.03)
    assert found.slow[0].p_value < ALPHA
    assert found.steps == STEPS  # no warm ones
    assert found.step_s == pytest.approx(0.05)


def test_noise_names_none_and_few_steps_are_not_tested(tmp_path: Path) -> None:
    found = told(write(tmp_path / "a"))
    assert (found.slow, found.not_tested) == ([], [])
    assert told(write(tmp_path / "b", slow=2, steps=40)).not_tested == [
        "40 steps are too few to tell a slow rank from noise; it takes 60"
    ]


def test_who_did_what(tmp_path: Path) -> None:
    write(tmp_path)
    assert [each.idle for each in told(tmp_path).ranks] == [None] * 3
    assert "did not finish" in told(tmp_path).lines[0]
    finish(tmp_path)
    found = told(tmp_path)
    assert [each.micro_batches for each in found.ranks] == [2 * STEPS, 2 * STEPS, STEPS]
    assert [each.idle for each in found.ranks] == [0.1, 0.25, 0.5]
    # In flight are two micro-batches a rank: learners n and n + 3.
    assert [each.pulled_bytes for each in found.ranks] == [0, 11, 22]
    assert [each.pushed_bytes for each in found.ranks] == [0, 33, 44]
    assert found.lines == [
        "90 updates of 180 gradients, 6 dropped",
        "staleness: mean 1.25, at most 3; 0: 25.0%, 1: 50.0%, 3: 25.0%",
    ]
    finish(tmp_path, again=2, lost_learners=1, staleness={str(late): 10 for late in range(10)})
    first, second = told(tmp_path).lines
    assert first.endswith("6 dropped, 2 computed again; learners lost: 1")
    assert second.endswith("7: 10.0%, more: 20.0%")
    simulated = {word: each for word, each in CAME_TO.items() if "_by_" not in word}
    simulated["idle_by_learner"] = {"0": 0.1, "1": 0.3}
    (tmp_path / "result.json").write_text(json.dumps({"synchrony": simulated}))
    assert told(tmp_path).lines[2] == "learners waited 20.0% of their time (at most 30.0%)"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, slow=1.5)
    finish(tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "60 steps of 50.0 ms; the server's updates take 2.0 ms of each" in out
    assert "rank 2 computes longer than the others: a micro-batch takes 15." in out
    assert main(["explain", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["ranks"][2]["idle"] == 0.5
    assert row["came_to"]["staleness"]["1"] == 90


def forecast_on(folder: Path, cluster: str, workers: int = 3) -> None:
    row: dict[str, Any] = {
        "mode": "asynchronous",
        "mode_in_words": "asynchronous",
        "cluster": cluster,
    }
    numbers = ("step_s", "step_low_s", "step_high_s", "staleness", "dropped", "idle")
    row |= dict.fromkeys((*numbers, "bytes_per_step"), 1.0)
    row |= {"after_step": 3, "workers": workers, "cluster_file": "", "average_s": None}
    (folder / "forecast.json").write_text(json.dumps(row))


def test_other_modes_are_planned_where_a_rank_is_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told_of(folder: Path) -> str:
        (folder / "recipe.toml").write_text(
            '[model]\nname = "lenet"\n[data]\nname = "generated"\n[train]\nsteps = 63\n'
            "global_batch_size = 96\nmicro_batch_size = 4\n"
            '[synchrony]\nmode = "stale"\nmax_staleness = 0\n'
            '[exchange]\ncompressor = "float16"\n'
        )
        assert main(["explain", str(folder)]) == 0
        return capsys.readouterr().out

    start = "planned with these ranks' own times on cpu-host"
    one = write(tmp_path / "one", slow=2.0)
    assert start not in told_of(one)  # no forecast says on which cluster
    forecast_on(one, "cpu-host")
    said = next(line for line in told_of(one).splitlines() if line.startswith(start))
    recipe, on = recipe_of(one), load_cluster("cpu-host")
    work = workload_of(recipe)
    seconds = [each.seconds for each in told(one).ranks]
    row = forecast(work, on, 3, "tree", "float16")
    own, *others = alternatives(work, on, row, recipe.synchrony, seconds)
    assert own.words == "stale, s = 0, float16"
    best = max(others, key=lambda each: each.gain)
    assert f"than {own.words}: {best.words} ({best.gain:.2f} times)" in said
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.api.explain.is_refused", lambda _: True)
        assert "no mode is 5 % faster" in told_of(one)  # of those that the other words leave
    forecast_on(one, "cpu-host", workers=4)
    assert "would bring is not known: 3 of 4 ranks are in the timings" in told_of(one)
    forecast_on(one, "nowhere")
    assert "would bring is not known: " in told_of(one)
    alike = write(tmp_path / "alike")
    forecast_on(alike, "cpu-host")
    assert start not in told_of(alike)


def test_no_server_and_damage(tmp_path: Path) -> None:
    write(tmp_path, steps=0)
    rows = read_timings(tmp_path)
    assert explain_served(tmp_path, rows) is None
    write(tmp_path / "other")
    for word, value, said in (
        ("pulled_bytes_by_learner", {}, "pulled_bytes_by_learner lacks learner 0"),
        ("staleness", {"late": 3}, r"\$.synchrony.staleness: expected str matching"),
        ("rank_by_learner", [3], r"\$.synchrony.rank_by_learner: expected object"),
        ("idle_by_rank", [3], r"\$.synchrony.idle_by_rank: expected object"),
        ("pushed_bytes_by_learner", [3], r"\$.synchrony.pushed_bytes_by_learner: expected object"),
    ):
        finish(tmp_path / "other", **{word: value})
        with pytest.raises(RunError, match=rf"result.json: .*{said}"):
            told(tmp_path / "other")
    finish(tmp_path / "other", staleness={"0": 0})
    assert told(tmp_path / "other").lines[1].startswith("staleness: ")
    (tmp_path / "other/result.json").write_text(json.dumps({"synchrony": {"updates": 3}}))
    with pytest.raises(RunError, match=r"result.json: .*missing required field gradients"):
        told(tmp_path / "other")
