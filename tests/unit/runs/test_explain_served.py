"""What is said of a run with a server, from records that are made for it."""

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
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.runs.explain_modes import ServedExplanation, explain_served
from firecaffe.runs.rank_times import ALPHA, read_timings
from tests.unit.runs.test_explain import write_rows

STEPS = 60
LEARNERS = [str(learner) for learner in range(6)]
CAME_TO = {
    "updates": 90, "gradients": 180, "dropped": 6, "lost_learners": 0,
    "mean_staleness": 1.25, "staleness": {"0": 45, "1": 90, "3": 45}, "time_s": 3.0,
    "idle_by_rank": {"0": 0.1, "1": 0.25, "2": 0.5},
    "rank_by_learner": dict(zip(LEARNERS, (0, 1, 2, 0, 1, 2), strict=True)),
    "pulled_bytes_by_learner": dict(zip(LEARNERS, (0, 10, 20, 0, 1, 2), strict=True)),
    "pushed_bytes_by_learner": dict(zip(LEARNERS, (0, 30, 40, 0, 3, 4), strict=True)),
}  # fmt: skip


def write(folder: Path, slow: float = 1.0, steps: int = STEPS, warm: int = 3) -> Path:
    """slow: how many times as long rank 2 takes for a micro-batch."""
    noise = random.Random(0)
    parts = ("data_s", "compute_s", "exposed_communication_s", "exchange_s", "update_s")
    early = [{"step": n, **dict.fromkeys(parts, 0.01), "step_s": 9.0} for n in range(1, warm + 1)]
    rows: list[dict[str, Any]] = []
    for step in range(warm + 1, warm + steps + 1):
        step_s = 0.05 if step > warm + 1 else 5.0  # in which all begin
        row = {"step": step, **dict.fromkeys(parts, 0.0), "update_s": 0.002, "step_s": step_s}
        by_rank = {
            rank: (2, 2 * 0.01 * times * noise.uniform(0.95, 1.05))
            for rank, times in enumerate((1, 1, slow))
            if rank < 2 or step % 2  # rank 2 does not bring something in every step
        }
        rows.append({**row, "by_rank": by_rank})
    write_rows(folder, {"rank-0": early + rows, "rank-1": early})
    return folder


def explained(folder: Path) -> ServedExplanation:
    served = explain_served(folder, read_timings(folder))
    assert served is not None
    return served


def finish(folder: Path, **changed: Any) -> None:
    (folder / "result.json").write_text(json.dumps({"synchrony": {**CAME_TO, **changed}}))


def test_a_slow_rank_is_named_and_noise_is_not(tmp_path: Path) -> None:
    served = explained(write(tmp_path / "slow", slow=1.5))
    assert [(slow.rank, slow.cause) for slow in served.slow] == [(2, "computes")]
    assert served.slow[0].factor == pytest.approx(1.5, rel=0.03)
    assert served.slow[0].p_value < ALPHA
    assert (served.steps, served.step_s) == pytest.approx((STEPS, 0.05))  # no warm ones
    served = explained(write(tmp_path / "noise"))
    assert (served.slow, served.not_tested) == ([], [])
    (note,) = explained(write(tmp_path / "short", slow=2, steps=40)).not_tested
    assert note.startswith("40 steps are too few")
    warm = write(tmp_path / "warm", steps=0)
    assert explain_served(warm, read_timings(warm)) is None


def test_who_did_what(tmp_path: Path) -> None:
    write(tmp_path)
    served = explained(tmp_path)
    assert [rank.idle for rank in served.ranks] == [None] * 3
    assert "did not finish" in served.lines[0]
    finish(tmp_path)
    served = explained(tmp_path)
    # In flight are two micro-batches a rank: learners n and n + 3.
    assert [(r.micro_batches, r.idle, r.pulled_bytes, r.pushed_bytes) for r in served.ranks] == [
        (2 * STEPS, 0.1, 0, 0),
        (2 * STEPS, 0.25, 11, 33),
        (STEPS, 0.5, 22, 44),
    ]
    assert served.lines == [
        "90 updates of 180 gradients, 6 dropped",
        "staleness: mean 1.25, at most 3; 0: 25.0%, 1: 50.0%, 3: 25.0%",
    ]
    finish(tmp_path, again=2, lost_learners=1, staleness={str(late): 10 for late in range(10)})
    first, second = explained(tmp_path).lines
    assert first.endswith("6 dropped, 2 computed again; learners lost: 1")
    assert second.endswith("7: 10.0%, more: 20.0%")
    finish(tmp_path, staleness={"0": 0})
    assert explained(tmp_path).lines[1].startswith("staleness: ")
    simulated = {word: value for word, value in CAME_TO.items() if "_by_" not in word}
    simulated["idle_by_learner"] = {"0": 0.1, "1": 0.3}
    (tmp_path / "result.json").write_text(json.dumps({"synchrony": simulated}))
    assert explained(tmp_path).lines[2] == "learners waited 20.0% of their time (at most 30.0%)"


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("pulled_bytes_by_learner", {}, "pulled_bytes_by_learner lacks learner 0"),
        ("staleness", {"late": 3}, r"\$.synchrony.staleness: expected str matching"),
        *(
            (word, [3], rf"\$.synchrony.{word}: expected object")
            for word in ("rank_by_learner", "idle_by_rank", "pushed_bytes_by_learner")
        ),
        ("gradients", None, "gradients: expected int"),
    ],
)
def test_damage_is_named(tmp_path: Path, word: str, value: Any, said: str) -> None:
    finish(write(tmp_path), **{word: value})
    with pytest.raises(RunError, match=rf"result.json: .*{said}"):
        explained(tmp_path)


RECIPE = """
model.name = "lenet"
data.name = "generated"
train = { steps = 63, global_batch_size = 96, micro_batch_size = 4 }
synchrony = { mode = "stale", max_staleness = 0 }
exchange.compressor = "float16"
"""


def forecast_on(folder: Path, cluster: str, workers: int = 3) -> None:
    numbers = ("step_s", "step_low_s", "step_high_s", "staleness", "dropped", "idle")
    row: dict[str, Any] = dict.fromkeys((*numbers, "bytes_per_step"), 1.0)
    row |= {"mode": "asynchronous", "mode_in_words": "asynchronous", "cluster": cluster}
    row |= {"after_step": 3, "workers": workers, "cluster_file": "", "average_s": None}
    (folder / "forecast.json").write_text(json.dumps(row))


def test_the_command_plans_other_modes_where_a_rank_is_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firecaffe.planner.modes.STEPS", 20)

    def said_of(folder: Path) -> str:
        (folder / "recipe.toml").write_text(RECIPE)
        assert main(["explain", str(folder)]) == 0
        return capsys.readouterr().out

    start = "planned with these ranks' own times on cpu-host"
    slow = write(tmp_path / "slow", slow=2.0)
    out = said_of(slow)
    assert start not in out  # no forecast says on which cluster
    assert "60 steps of 50.0 ms; the server's updates take 2.0 ms of each" in out
    assert "rank 2 computes longer than the others: a micro-batch takes 20." in out
    forecast_on(slow, "cpu-host")
    line = next(line for line in said_of(slow).splitlines() if line.startswith(start))
    recipe, on = recipe_of_run(slow), load_cluster("cpu-host")
    work = workload_of(recipe)
    seconds = [rank.seconds for rank in explained(slow).ranks]
    row = forecast(work, on, 3, "tree", "float16")
    planned, *others = alternatives(work, on, row, recipe.synchrony, seconds)
    assert planned.words == "stale, s = 0, float16"
    best = max(others, key=lambda mode: mode.gain)
    assert f"than {planned.words}: {best.words} ({best.gain:.2f} times)" in line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.api.explanation.is_refused", lambda _: True)
        assert "no mode is 5 % faster" in said_of(slow)  # of those that the other words leave
    forecast_on(slow, "cpu-host", workers=4)
    assert "would bring is not known: 3 of 4 ranks are in the timings" in said_of(slow)
    forecast_on(slow, "nowhere")
    assert "would bring is not known: " in said_of(slow)
    (slow / "forecast.json").unlink()
    finish(slow)
    assert main(["explain", str(slow), "--json"]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["ranks"][2]["idle"] == 0.5
    assert explanation["came_to"]["staleness"]["1"] == 90
    equal = write(tmp_path / "equal")
    forecast_on(equal, "cpu-host")
    assert start not in said_of(equal)
