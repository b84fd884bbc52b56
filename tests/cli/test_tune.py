"""`firecaffe tune` as a user types it, to the recipe that it writes; and what it refuses."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import firecaffe.cli
from benchmarks.kit.small_run import steps_of
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.errors import RunError
from firecaffe.training.trial import Trial, TrialScore, command_lock
from firecaffe.tuning.batch_search import TuneRequest
from tests import typed
from tests.unit.cluster.watches import until

RECIPE = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
global_batch_size = 16
micro_batch_size = 16
steps = 64
eval_batch_size = 500
device = "cpu"
[solver]
base_lr = 0.01
"""

SERVED = ["--synchrony.mode", "stale", "--synchrony.clock", "simulated"]


KILLED = ["--global-batch-size", "64", "--seeds", "1", "--train.steps", "100000"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def test_a_search_to_its_end_and_again(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    words = ["--global-batch-size", "64", "--budget", "0.5", "--seeds", "1", "--out", str(out)]
    command = ["tune", str(recipe), *words, "--side-by-side", "2", "--json"]
    done = typed.firecaffe(*command)
    assert done.returncode == 17, done.stderr  # one seed says nothing
    found = json.loads(done.stdout)
    assert [each["state"] for each in found["searched"]] == ["finished", "finished"]
    assert [len(each["again"]) for each in found["searched"]] == [1, 1]
    assert (found["verdict"]["verdict"], found["verdict"]["more"]) == ("not enough seeds", 2)
    assert found["verdict"]["against"]["low"] is None  # one run each bears no interval
    last = done.stderr.splitlines()[-1]
    assert last.startswith("firecaffe: not enough seeds, about 2 more")
    assert last.endswith(f"is {out}/small_b64.toml; --seeds 3 goes on with it")
    assert json.loads((out / "tune.json").read_text()) == found

    written = recipe_of(out / "small_b64.toml")
    assert written.train.global_batch_size == 64
    assert written.solver.base_lr == found["best"]["candidate"]["base_lr"]
    assert (written.data.hold_out, written.run.folder) == (0.0, "")
    assert written.run.tuned.startswith("best of 2 candidates at batch 64")

    changed = ["--solver.base_lr", "0.02", "--run.folder", str(tmp_path / "changed")]
    trained = typed.firecaffe("train", out / "small_b64.toml", *changed)
    trained.check_returncode()
    assert "run.tuned is left out: its search has ended in another recipe" in trained.stdout
    assert json.loads((tmp_path / "changed" / "result.json").read_text())["tuned"] == ""

    assert firecaffe.cli.main(command) == 17  # every training was there
    assert capsys.readouterr().out == done.stdout
    folders = [*found["before"], *found["after"]]
    assert firecaffe.cli.main(["compare", "--by", "recipe", *folders]) == 0

    # Its own runs are no other seeds, nor runs of the recipe as it is.
    against = [*words, "--against", *found["before"]]
    assert "a repetition is no other seed" in typed.refused(
        2, "tune", recipe, *against, *found["before"]
    )
    assert "its train.global_batch_size is 64, the recipe's is 16" in typed.refused(
        2, "tune", recipe, *words, "--against", *found["after"]
    )
    seeds = {path.name.split("-")[-1] for path in out.glob("*-seed-*") if path.is_dir()}
    assert seeds == {"1", "2"}  # the finalists', and behind them the verdict's

    other = ["128" if word == "64" else word for word in words]
    assert firecaffe.cli.main(["tune", str(recipe), "--train.steps", "256", *other]) == 8
    (out / "search.json").write_text("[]")
    assert "search.json: cannot be read (expected object" in typed.refused(8, *command)


def test_only_a_training_of_the_verdict_is_told_by_its_test_samples(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the recipe holds out itself."""

    def planted(asked: TuneRequest, say: Callable[[Trial], None], _: object) -> NoReturn:
        for name, is_test_scored in (("candidate-01", False), ("before-seed-2", True)):
            trial = Trial(name, asked.recipe, tmp_path, is_test_scored=is_test_scored)
            trial.scores.append(TrialScore(64, 0.25, is_finite=True))
            trial.folder.mkdir()
            (trial.folder / "result.json").write_text('{"steps": 64, "top1": 0.5}')
            say(trial)
        raise RunError("no more is asked of it")

    monkeypatch.setattr("firecaffe.api.rate_search.search", planted)
    words = ["--global-batch-size", "64", "--data.hold_out", "0.2"]
    assert firecaffe.cli.main(["tune", str(recipe), *words]) == RunError.exit_code
    candidate, before, _ = capsys.readouterr().err.splitlines()
    assert candidate.endswith(": top-1 25.00% after 64 steps, done")
    assert before.endswith(": test top-1 50.00% after 64 steps")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "--global-batch-size is missing: the batch size to tune for"),
        (["--global-batch-size", "0"], 2, "--global-batch-size is 0"),
        (["--global-batch-size", "24"], 2, "expected a multiple of micro_batch_size, 16"),
        (["--global-batch-size", "128"], 2, "leaves 8 steps of training; expected at least 16"),
        (["--global-batch-size", "64", "--solvers", "adam"], 2, "no rule says a rate"),
        (["--global-batch-size", "64", "--against", "nowhere"], 8, "there is no run"),
        (["--global-batch-size", "64", "--seeds", "0"], 2, "--seeds is 0"),
        (["--global-batch-size", "64", "--budget", "0"], 2, "--budget is 0; it must be more than"),
        (
            ["--global-batch-size", "64", *SERVED],
            2,
            "synchrony.mode is stale, whose updates are not",
        ),
        (["--global-batch-size", "64", "--solver.base_lr", "0"], 2, "solver.base_lr is 0"),
        (["--global-batch-size", "64", "--write", "no/x.toml"], 8, "there is no folder no"),
        (["--global-batch-size", "64", "--nproc-per-node", "2"], 2, "2 ranks but only 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = typed.refused(code, "tune", recipe, *words)
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "runs").exists()


def test_a_search_that_is_killed_leaves_no_training(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "search"
    with typed.Typed("-m", "firecaffe", "tune", recipe, *KILLED, "--out", out) as search:
        until(lambda: any(map(steps_of, out.glob("*"))))
        os.kill(search.pid, signal.SIGKILL)
        search.wait()
        until(lambda: is_free(out))


def is_free(folder: Path) -> bool:
    try:
        with command_lock(folder):
            return True
    except RunError:
        return False
