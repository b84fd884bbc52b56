"""Trainings side by side, with a script in place of `firecaffe train` that leaves what it does."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from firecaffe.cluster.launcher import RankFailedError
from firecaffe.errors import PreemptedError, RunError
from firecaffe.training import trial as trial_module
from firecaffe.training.trial import (
    Trial,
    TrialScore,
    environment_of,
    run_trials,
    scores,
    working_in,
)
from tests.kit.training import recipe_with
from tests.kit.training_fixtures import Patch

SCRIPT = """
import json, sys, time, tomllib
from pathlib import Path
recipe = tomllib.loads(Path(sys.argv[1]).read_text())
folder = Path(recipe["run"]["folder"])
folder.mkdir()
def test(step, top1):
    row = {"kind": "validation", "step": step, "top1": top1, "loss": 1.0}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\\n")
mode = recipe["model"]["name"]
test(1, 0.1)
if mode == "fails":
    print("firecaffe: rank 0 ran out of luck")
    sys.exit(9)
if mode == "diverges":
    (folder / "fault.json").write_text('{"kind": "not_finite", "step": 2}')
    sys.exit(18)
if mode == "waits":
    (folder / "waits").touch()
    time.sleep(600)
test(2, 0.2)
(folder / "result.json").write_text("{}")
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: Patch) -> Path:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    monkeypatch.setattr(trial_module, "command_of", lambda recipe, _: [*command, str(recipe)])
    monkeypatch.setattr(trial_module, "POLL_S", 0.05)
    return tmp_path / "search"


def trial(parent: Path, name: str, mode: str = "ends", **words: Any) -> Trial:
    return Trial(name, recipe_with({"model.name": mode, "train.steps": 2}), parent, **words)


def left(parent: Path) -> list[psutil.Process]:
    """Trainings that are at work."""
    return [p for p in psutil.Process().children() if str(parent) in " ".join(p.cmdline())]


def run(trials: Sequence[Trial], parent: Path, at_once: int = 2) -> list[str]:
    """The names, as they ended."""
    ended: list[str] = []
    with working_in(parent) as lock:
        run_trials(trials, at_once, 1, lock, lambda each: ended.append(each.name))
    return ended


def test_a_search_goes_on_over_trainings_that_end_are_given_up_or_diverge(parent: Path) -> None:
    told = [TrialScore(1, 0.1, True), TrialScore(2, 0.2, True)]
    right = trial(parent, "a")
    hopeless = trial(parent, "b", "waits", end=lambda told: len(told) == 1)
    diverging = trial(parent, "c", "diverges", end=lambda told: not told[-1].is_finite)
    assert sorted(run([right, hopeless, diverging], parent)) == ["a", "b", "c"]
    assert [each.ended_early for each in (right, hopeless, diverging)] == [False, True, True]
    assert (right.scores, right.is_finished, hopeless.is_finished) == (told, True, False)
    assert diverging.scores == [TrialScore(1, 0.1, True), TrialScore(2, 0.1, False)]
    again = trial(parent, "b", "waits", end=lambda told: len(told) == 1)
    assert run([again], parent) == ["b"]  # at once, from what is there
    assert again.scores == hopeless.scores
    with pytest.raises(RankFailedError):  # where nobody is to give it up, as of a finalist's seed
        run([trial(parent, "d", "diverges")], parent)


def test_finished_trainings_are_taken_and_left_ones_begun_anew(parent: Path) -> None:
    run([trial(parent, "a")], parent)
    (parent / "b").mkdir()
    before = (parent / "a" / "metrics.jsonl").stat().st_mtime_ns
    assert run([trial(parent, "a"), trial(parent, "b")], parent) == ["a", "b"]
    assert (parent / "a" / "metrics.jsonl").stat().st_mtime_ns == before
    assert (parent / "b.left-1").is_dir()
    # Another training's folder is not taken, as where a larger budget has found another best.
    other = trial(parent, "a")
    other.recipe = other.recipe.replace("train.seed", 7)
    assert not other.is_there
    run([other], parent)
    assert (parent / "a.left-1" / "result.json").exists()
    assert other.is_there


def test_one_that_fails_ends_the_search_and_the_others(parent: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        run([trial(parent, "a", "fails"), trial(parent, "b", "waits")], parent)
    assert str(caught.value) == f"a: rank 0 ran out of luck (see {parent / 'a.log'})"
    assert caught.value.exit_code == 9
    assert not left(parent)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_search_that_is_asked_to_stop_leaves_no_training(parent: Path, number: int) -> None:
    before = signal.getsignal(number)

    def here(*_: object) -> None:  # else a fault would end the tests
        pytest.fail("nobody heard it")

    signal.signal(number, here)

    def ask(_: Sequence[TrialScore]) -> bool:
        os.kill(os.getpid(), number)
        return False

    first = trial(parent, "a", end=ask)
    with pytest.raises(PreemptedError, match="the same command continues it"):
        run([first, trial(parent, "b", "waits")], parent)
    assert not left(parent)
    assert signal.getsignal(number) is here
    signal.signal(number, before)


def test_two_searches_never_work_in_one_folder(parent: Path) -> None:
    """Nor one where another has left a training: it holds the lock as long as it lives."""
    with working_in(parent) as lock:
        with pytest.raises(RunError, match="another command works there"), working_in(parent):
            pass
        begun = trial_module._start(trial(parent, "a", "waits"), 1, 0, lock)
    try:
        with pytest.raises(RunError, match="or a training that one has left"), working_in(parent):
            pass
    finally:
        begun.kill()
        begun.wait()
    with working_in(parent):
        pass


def test_scores_that_cannot_be_read(tmp_path: Path) -> None:
    assert scores(tmp_path) == []
    path = tmp_path / "metrics.jsonl"
    row = {"kind": "validation", "step": 3, "top1": 0.5, "loss": None}
    path.write_text(json.dumps(row) + "\n{")
    assert scores(tmp_path) == [TrialScore(3, 0.5, False)]
    path.write_text('["validation"]\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read"):
        scores(tmp_path)


def test_each_slot_has_gpus_of_its_own(monkeypatch: Patch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    shown = [environment_of(slot, 2).get("CUDA_VISIBLE_DEVICES") for slot in (0, 1, 2)]
    assert shown == ["0,1", "2,3", None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert environment_of(1, 1)["CUDA_VISIBLE_DEVICES"] == "7"
