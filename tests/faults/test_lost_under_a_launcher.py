"""Workers of a server that are lost under a launcher: it lets them go, and the others go on."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import RECIPE, command
from firecaffe.cluster.secret import SECRET
from firecaffe.cluster.world import World
from firecaffe.faults import KINDS
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.training.verification import replay
from tests.typed import Typed, python

SYNCHRONY = """
[exchange]
silent_s = 2.0
[solver]
base_lr = 0.002
[synchrony]
mode = "asynchronous"
warm_steps = 2
"""
STEPS = 12
WORDS = ("--train.steps", str(STEPS), "--checkpoint.every", "4")
HOST = os.uname().nodename
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE + SYNCHRONY)
    return path


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def check_whole(folder: Path, lost: set[str], steps: int = STEPS) -> None:
    """That each sample came once, the lost ranks are counted, and the log gives the same bits."""
    row = read(folder / "result.json")["synchrony"]
    assert row["gradients"] == 6 * (steps - 2)
    assert row["lost_ranks"].keys() == lost
    assert row["lost_learners"] == len(lost)
    assert replay(folder, recipe_of(folder), ALONE).is_same


def test_its_exit_code_is_that_of_the_rest(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    faults = ["kill:rank=1,step=5", "freeze:rank=2,step=5", "exception:rank=3,step=5"]
    steps = 60  # long enough that on a busy host each rank has a part of step 5 or later
    training = command(recipe, folder, 4, *WORDS, "--train.steps", str(steps))[1:]
    done = python(*training, environment=environment(*faults))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("firecaffe: ")]
    assert len(lines) == 3
    for rank, words in enumerate(("was killed", "froze", "failed"), 1):
        (line,) = [each for each in lines if each.startswith(f"firecaffe: rank {rank} on {HOST} ")]
        assert words in line
        assert line.endswith("; the others go on")
    assert "SIGKILL (seen by its launcher)" in "".join(lines)
    assert "injected exception" in "".join(lines)
    fault = read(folder / "fault.json")
    found = sorted((each["rank"], each["kind"]) for each in [fault, *fault["earlier"]])
    assert found == [(1, "killed"), (2, "frozen"), (3, "exception")]
    assert {each["then"] for each in [fault, *fault["earlier"]]} == {"the others go on"}
    check_whole(folder, {"1", "2", "3"}, steps)


@pytest.mark.parametrize(("rank", "step"), [(1, 2), (0, 5)], ids=["in warm steps", "rank 0"])
def test_whom_nobody_goes_on_without_ends_all(
    recipe: Path, tmp_path: Path, rank: int, step: int
) -> None:
    training = command(recipe, tmp_path / "run", 2, *WORDS)[1:]
    done = python(*training, environment=environment(f"kill:rank={rank},step={step}"))
    assert done.returncode == KINDS["killed"].exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"firecaffe: rank {rank} on {HOST} was killed")
    assert read(tmp_path / "run" / "fault.json")["then"] == "the run ended"


def test_a_lost_server_starts_again_from_its_newest_checkpoint(
    recipe: Path, tmp_path: Path
) -> None:
    """With the events up to it, so that the log of both starts gives the same bits."""
    folder = tmp_path / "run"
    training = command(recipe, folder, 3, *WORDS, "--max-restarts", "1")[1:]
    done = python(*training, environment=environment("kill:rank=0,step=11"))
    assert done.returncode == 0, done.stderr
    assert f"firecaffe: rank 0 on {HOST} was killed" in done.stderr
    row = read(folder / "result.json")["synchrony"]
    assert row["lost_learners"] == 3  # those of the first start
    assert row["gradients"] >= 6 * (STEPS - 2)
    assert replay(folder, recipe_of(folder), ALONE).is_same


def test_a_launcher_without_ranks_waits_for_the_others(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    words = [*WORDS, "--nnodes", "2", "--rdzv-endpoint", place, "--rdzv-id", "lost"]
    training = command(recipe, folder, 1, *words)[1:]
    faults = environment("kill:rank=1,step=5") | {SECRET: "that of these two hosts"}
    with (
        Typed(*training, environment=faults) as first,
        Typed(*training, environment=faults) as second,
    ):
        said = [first.communicate(), second.communicate()]
        assert [first.wait(), second.wait()] == [0, 0], said
    # Who of the two has rank 1 is the store's choice.
    errors = [line for _, each in said for line in each.splitlines()]
    assert len(errors) == 1, errors
    (line,) = errors
    assert line.startswith(f"firecaffe: rank 1 on {HOST}")
    assert line.endswith("SIGKILL (seen by its launcher); the others go on")
    check_whole(folder, {"1"})
