"""Faults that really happen to the ranks of a run: one line, an exit code, and nothing lost.

The rank that is named is the one that the fault was put into; the weights at the end are those of a
run that nothing has happened to.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import RECIPE, command, pack_photos, photo_recipe, state_of, steps_of
from firecaffe.faults import KINDS
from firecaffe.training.plugins import VARIABLE as PLUGINS
from tests.faults.runs import lines_of_ours, read, write_recipe
from tests.typed import python

STEPS = 12
SLOW = pytest.mark.slow
SLOW_TO_RESTART = ("kill", "exception", "out_of_memory")
"""A kill and its restart are in the test of a damaged checkpoint too."""
WORDS = ("--train.steps", str(STEPS), "--checkpoint.every", "3", "--exchange.silent_s", "3")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def fault_of(folder: Path) -> dict[str, Any]:
    return read(folder / "fault.json")


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed_by(recipe, tmp_path_factory.mktemp("undisturbed") / "run")


def undisturbed_by(recipe: Path, folder: Path) -> str:
    """The state at the end of a run on one worker."""
    done = train(recipe, folder, workers=1)
    assert done.returncode == 0, done.stderr
    return state_of(folder)


def train(
    recipe: Path, folder: Path, *words: str, faults: Sequence[str] = (), workers: int = 3
) -> subprocess.CompletedProcess[str]:
    training = command(recipe, folder, workers, *WORDS, *words)[1:]
    return python(*training, environment=environment(*faults))


KIND_OF = {
    "kill": ("killed", "SIGKILL"),
    "freeze": ("frozen", " s, while its host answers"),
    "exception": ("exception", "ArithmeticError: injected exception"),
    "out_of_memory": ("out_of_memory", "can't allocate memory"),
    "data_end": ("data", "the data of rank 1 end here"),
}


def check_line(line: str, folder: Path, injected: str) -> dict[str, Any]:
    """That the line names rank 1 at step 8 and says what has happened; the fault as recorded."""
    kind, words = KIND_OF[injected]
    assert line.startswith(f"firecaffe: rank 1 on {os.uname().nodename} ")
    assert "at step 8" in line
    assert words in line
    fault = fault_of(folder)
    assert (fault["kind"], fault["rank"], fault["step"]) == (kind, 1, 8)
    told, _, advice = str(fault["line"]).rpartition("; ")
    assert line.startswith(f"firecaffe: {told}; ")
    assert line.endswith(advice) == (fault["then"] == "the run ended")  # else it is done already
    return fault


def check_restart(
    done: subprocess.CompletedProcess[str], folder: Path, injected: str, undisturbed: str
) -> None:
    """That the run has named rank 1 at step 8, gone on once, and ended in the undisturbed bits."""
    assert done.returncode == 0, done.stderr
    assert state_of(folder) == undisturbed
    assert steps_of(folder) == list(range(1, STEPS + 1))  # none lost, none twice
    (line,) = lines_of_ours(done.stderr)
    assert line.endswith("; restart 1 of 1")
    assert check_line(line, folder, injected)["then"] == "restart 1 of 1"


def test_what_would_be_so_again_is_not_restarted(recipe: Path, tmp_path: Path) -> None:
    """The guilty rank is named, and the run ends."""
    faults = ["data_end:rank=1,step=8"]
    done = train(recipe, tmp_path / "run", "--max-restarts", "5", faults=faults)
    assert done.returncode == KINDS["data"].exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    fault = check_line(line, tmp_path / "run", "data_end")
    assert (fault["then"], fault["earlier"]) == ("the run ended", [])
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_shard_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    """By the reader itself, whose batches were fetched ahead: some steps later."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(photo_recipe(pack_photos(tmp_path)))
    faults = ["truncated_shard:rank=1,step=2"]
    done = train(recipe, tmp_path / "run", "--train.steps", "100", faults=faults, workers=2)
    assert done.returncode == KINDS["data"].exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"firecaffe: rank 1 on {os.uname().nodename} ")
    assert re.search(r"train-0000\d\.shard, sample \d+: \d+ of \d+ bytes could be read; i", line)
    assert fault_of(tmp_path / "run")["rank"] == 1


@pytest.mark.parametrize(
    "injected", ["freeze", *(pytest.param(each, marks=SLOW) for each in SLOW_TO_RESTART)]
)
def test_a_restart_names_the_rank_and_ends_in_the_same_bits(
    recipe: Path, tmp_path: Path, undisturbed: str, injected: str
) -> None:
    faults = [f"{injected}:rank=1,step=8"]
    done = train(recipe, tmp_path / "run", "--max-restarts", "1", faults=faults)
    check_restart(done, tmp_path / "run", injected, undisturbed)
    assert "going on after step" in done.stdout


HEAD = 'parts = 2\nsplit = { "ip1" = "neurons", "ip2" = "inputs" }\n'
LAYOUTS = {
    "stages": ('data = 1\nstages = ["ip1"]\n', ""),
    "split": (f"data = 1\nmodel = 2\n{HEAD}", HEAD),
    "one weird trick": (f'data = 1\nmodel = 2\nscheme = "one_weird_trick"\n{HEAD}', HEAD),
}
"""[parallel] of two workers, and what one worker has of it."""


@pytest.mark.parametrize("name", ["stages", "one weird trick", pytest.param("split", marks=SLOW)])
def test_a_killed_rank_that_holds_a_part_is_named_and_the_run_goes_on(
    name: str, tmp_path: Path
) -> None:
    layout, alone = (tmp_path / each for each in ("layout.toml", "alone.toml"))
    for path, words in zip((layout, alone), LAYOUTS[name], strict=True):
        path.write_text(f"{RECIPE}\n[parallel]\n{words}")
    faults = ["kill:rank=1,step=8"]
    done = train(layout, tmp_path / "run", "--max-restarts", "1", faults=faults, workers=2)
    check_restart(done, tmp_path / "run", "kill", undisturbed_by(alone, tmp_path / "alone"))
    assert "going on after step 6" in done.stdout


def test_a_kill_between_the_folder_and_its_announcement(recipe: Path, tmp_path: Path) -> None:
    """The next attempt goes on in it; another run does not."""
    folder = tmp_path / "run"
    words = command(recipe, folder, 2, "--train.steps", "3", "--max-restarts", "1")[1:]
    done = python(*words, environment={PLUGINS: "tests.faults.killed_at_its_folder"})
    assert done.returncode == 0, done.stderr
    assert "restart 1" in done.stderr
    assert steps_of(folder) == [1, 2, 3]
    again = python(*words)
    assert again.returncode != 0
    assert "exists already" in again.stderr


def test_the_soak_in_short() -> None:
    """A few kills at random moments, and the run ends in the undisturbed bits."""
    words = ["--kills", 2, "--steps", 30, "--workers", 2, "--seed", 5, "--pause", 1]
    done = python("-m", "benchmarks.faults.soak", *words)
    assert done.returncode == 0, done.stderr
    assert all(line.endswith("right") for line in done.stdout.splitlines() or [""])


def test_restarts_come_to_an_end(recipe: Path, tmp_path: Path) -> None:
    faults = ["kill:rank=2,step=5", "kill:rank=1,step=8,attempt=1"]
    done = train(recipe, tmp_path / "run", "--max-restarts", "1", faults=faults)
    assert done.returncode == KINDS["killed"].exit_code, done.stderr
    first, last = lines_of_ours(done.stderr)
    assert first.endswith("; restart 1 of 1")
    assert check_line(last, tmp_path / "run", "kill")["then"] == "the run ended"
    assert not (tmp_path / "run" / "result.json").exists()
    (earlier,) = fault_of(tmp_path / "run")["earlier"]
    assert (earlier["rank"], earlier["step"], earlier["then"]) == (2, 5, "restart 1 of 1")


@pytest.mark.parametrize(
    "damage", ["truncated_checkpoint", pytest.param("flipped_byte_checkpoint", marks=SLOW)]
)
def test_a_damaged_checkpoint_is_passed_over(
    recipe: Path, tmp_path: Path, undisturbed: str, damage: str
) -> None:
    faults = [f"{damage}:step=6", "kill:rank=1,step=8"]
    done = train(recipe, tmp_path / "run", "--max-restarts", "1", faults=faults)
    assert done.returncode == 0, done.stderr
    assert "step-00000006" in done.stdout
    assert "an older checkpoint is taken" in done.stdout
    assert "going on after step 3" in done.stdout
    check_restart(done, tmp_path / "run", "kill", undisturbed)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=SLOW), 3])
def test_a_run_that_is_asked_to_stop_can_be_resumed(
    recipe: Path, tmp_path: Path, undisturbed: str, workers: int
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    rank = workers - 1
    done = train(recipe, first, faults=[f"preempt:rank={rank},step=7"], workers=workers)
    assert done.returncode == 75, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("firecaffe: stopped after step 7 (SIGTERM)")
    fault = fault_of(first)
    assert (fault["kind"], fault["rank"], fault["earlier"]) == ("preempted", rank, [])
    done = train(recipe, second, "--resume", str(first), workers=2)
    assert done.returncode == 0, done.stderr
    assert steps_of(second)[0] == 8
    assert state_of(second) == undisturbed


def test_ranks_whose_launcher_is_killed_save_and_end(
    recipe: Path, tmp_path: Path, undisturbed: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    done = train(recipe, first, faults=["launcher_killed:rank=1,step=7"])
    # All who could write to its stdout have ended, or the command would still be read.
    assert done.returncode == -9
    assert fault_of(first)["kind"] == "launcher_killed"
    done = train(recipe, second, "--resume", str(first), workers=1)
    assert done.returncode == 0, done.stderr
    assert steps_of(second)[0] >= 8
    assert f"going on after step {steps_of(second)[0] - 1} of {first}" in done.stdout
    assert state_of(second) == undisturbed
