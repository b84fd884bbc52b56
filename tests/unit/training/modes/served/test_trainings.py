"""Whole trainings with a server: they learn, go on from any checkpoint, and a run's log alone gives
its bits again: of every mode, finished or not, resumed or not.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firecaffe import Result, SynchronyConfig
from firecaffe.errors import RecipeError, RunError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.synchrony.config import SERVED
from firecaffe.training.given_parts import Parts
from firecaffe.training.join import join_run
from firecaffe.training.verification import Replayed, replay
from tests.kit.training import ALONE, data, fit_points, network, record_of, rows_of
from tests.kit.training import recipe_of_points as recipe
from tests.kit.training_fixtures import Capture, Patch

MODES: dict[str, dict[str, Any]] = {
    "backup": {"mode": "backup", "backup_workers": 2},
    "again": {"mode": "backup", "backup_workers": 2, "dropped": "again"},
    "stale": {"mode": "stale", "max_staleness": 0, "warm_steps": 2},
    "asynchronous": {"mode": "asynchronous", "staleness_rate": "inverse"},
    "softsync": {"mode": "asynchronous", "gradients_per_update": 3, "compensate": "delay"},
    "gap": {"mode": "asynchronous", "compensate": "gap", "server_momentum": "delayed_nesterov"},
    "encoded": {"mode": "asynchronous", "compressor": "one_bit"},
}
assert {words["mode"] for words in MODES.values()} == set(SERVED)


def train(folder: Path, words: dict[str, Any], resume: Path | None = None, **more: Any) -> Result:
    return fit_points(recipe(folder, words, **more), resume)


def replayed(folder: Path, to: Path | None = None, seed: int = 0) -> Replayed:
    parts = Parts(network, train=data(300, seed), test=data(100, 1))
    return replay(folder, recipe_of(folder), ALONE, to, parts)


@pytest.mark.parametrize("name", MODES)
def test_it_learns_and_a_resume_and_a_replay_give_its_bits(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The loss falls, from guessing's (1.39) to that of a network that tells most points apart."""
    run, again = tmp_path / "run", tmp_path / "again"
    result = train(run, MODES[name])
    losses = [row["loss"] for row in result.history if row["kind"] == "train"]
    assert losses[0] > 1.3
    assert sum(losses[-10:]) / 10 < 0.75  # BatchNorm over four samples is noise
    assert result.top1 > 0.93
    row = record_of(run)["synchrony"]
    # Of 270 samples: 68 leaves in the 9 steps of an epoch; 40 steps are four epochs and 4 steps.
    warm = MODES[name].get("warm_steps", 0)
    assert row["gradients"] + row["dropped"] == 4 * 68 + 4 * 8 - 8 * warm
    assert (row["dropped"] > 0, row["again"] > 0) == (name == "backup", name == "again")
    late = {"backup": 0, "again": 0, "softsync": 5 / 3, "stale": 2.7}.get(name, 4)
    assert row["mean_staleness"] == pytest.approx(late, abs=0.5)
    resumed = train(again, MODES[name], run / "checkpoints" / "step-00000021")
    assert resumed.state_sha256 == result.state_sha256
    assert (again / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()
    assert record_of(again)["synchrony"] == row
    monkeypatch.delattr("firecaffe.synchrony.clock.SimulatedClock.next")  # no clock is asked
    once_more = replayed(run)
    assert once_more.is_same
    assert once_more.computed.weights == result.weights_sha256
    assert once_more.computed.state == result.state_sha256


def test_a_run_that_was_ended_is_replayed_to_its_checkpoint(tmp_path: Path) -> None:
    run, on = tmp_path / "run", tmp_path / "on"
    whole = train(run, MODES["softsync"], steps=20)
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    log = run / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-30])  # killed while it wrote a line
    again = replayed(run, tmp_path / "again")
    assert (again.is_same, again.computed.step) == (True, 14)
    # What is kept goes on as the run would have.
    rest = train(on, MODES["softsync"], run / "checkpoints" / "step-00000014", steps=20)
    assert rest.state_sha256 == whole.state_sha256
    assert replayed(on).is_same
    # So does what the replay kept.
    kept = tmp_path / "again" / "checkpoints" / "step-00000014"
    other = train(tmp_path / "other", MODES["softsync"], kept, steps=20)
    assert other.state_sha256 == whole.state_sha256
    assert replayed(tmp_path / "other").is_same
    with pytest.raises(RunError, match="exists already"):
        replayed(run, tmp_path / "again")


def test_other_events_or_data_are_other_bits(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, MODES["asynchronous"], steps=9)
    assert not replayed(run, seed=7).is_same
    train(other, {**MODES["asynchronous"], "speeds": "constant"}, steps=9)
    shutil.copy(other / "events.jsonl", run / "events.jsonl")
    again = replayed(run)
    assert not again.is_same
    assert again.computed == replayed(other).recorded


def test_a_damaged_log_is_refused_with_its_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, MODES["backup"], steps=5)
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:20], lines[20].replace(b": ", b": 1", 2), *lines[21:]]))
    with pytest.raises(RunError, match=r"events\.jsonl line 21: is not (what was written|a log)"):
        replayed(run)
    log.write_bytes(b"".join(lines[:40]))
    with pytest.raises(RunError, match=r"line 41: is not there; the run has gone on"):
        replayed(run)
    train(tmp_path / "plain", {"mode": "every_step"}, steps=2)
    with pytest.raises(RunError, match="every_step writes no events"):
        replayed(tmp_path / "plain")


def test_warm_steps_are_those_of_every_step(tmp_path: Path) -> None:
    words = {"mode": "asynchronous", "warm_steps": 7}
    train(tmp_path / "served", words, steps=8)
    plain = replace(recipe(tmp_path / "plain", words, steps=8), synchrony=SynchronyConfig())
    fit_points(plain)
    names = ("served", "plain")
    served, together = ([row["loss"] for row in rows_of(tmp_path / n, "train")] for n in names)
    assert served[:7] == together[:7]
    assert served[7] != together[7]


def test_events_that_are_gone_are_told_of(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    whole = train(run, MODES["stale"], steps=14)
    (run / "events.jsonl").unlink()
    checkpoint = run / "checkpoints" / "step-00000007"
    again = train(tmp_path / "again", MODES["stale"], checkpoint, steps=14)
    assert "cannot be replayed" in capsys.readouterr().out
    assert again.state_sha256 == whole.state_sha256


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (r"less than 1, the learners of 1 worker,", {"mode": "backup", "clock": "real"}),
        ("at most 2, .*in_flight 2", {"gradients_per_update": 3, "clock": "real", "in_flight": 2}),
        (r"speeds_from x\.jsonl: No such", {"speeds": "measured", "speeds_from": "x.jsonl"}),
    ],
)
def test_words_that_cannot_be_here(line: str, words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line) as caught:
        train(tmp_path / "run", {"mode": "asynchronous", **words})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("words", [{"server": "sharded"}, {"lock": "none"}])
def test_no_worker_comes_to_weights_in_parts(words: dict[str, Any], tmp_path: Path) -> None:
    made = recipe(tmp_path / "run", {"mode": "asynchronous", "clock": "real", **words})
    with pytest.raises(RecipeError, match="come to runs whose weights are at rank 0"):
        join_run(check_recipe(made), "localhost:1")
