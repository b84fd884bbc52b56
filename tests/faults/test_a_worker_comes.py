"""A worker comes to a run that is there, computes as its ranks do, and may be lost as they may."""

import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch._C._distributed_c10d import TCPStore

from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import RECIPE, command
from firecaffe.cli.train import main
from firecaffe.cluster import joining
from firecaffe.errors import AgreementError, LaunchError, RecipeError
from firecaffe.training.plugins import VARIABLE as PLUGINS
from tests.faults import held
from tests.faults.test_lost_under_a_launcher import SYNCHRONY, check_whole
from tests.typed import TIMEOUT_S, Typed, firecaffe

STEPS = 16
WORDS = ("--train.steps", str(STEPS))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(RECIPE + SYNCHRONY.replace("2.0", "20.0"))  # rank 0 is held
    return path


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def place_in(run: Typed) -> str:
    """Where workers may come, as the run says it."""
    for line in run.stdout:
        if found := re.search(r"--join (\S+)", line):
            return found[1]
    raise AssertionError("the run does not say it")


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def test_it_computes_beside_those_that_are_left(recipe: Path, tmp_path: Path) -> None:
    """Rank 1 is killed. One comes and is killed too; another comes and stays. Rank 0 is held
    meanwhile. The second has the run's `in_flight`, not its own.
    """
    folder, file = tmp_path / "run", tmp_path / "go on"
    faults = environment("kill:rank=1,step=4")
    # The last is asked first: a slow rank 1 may have no work before the step that is held.
    hold = {held.STEP: "8", held.FILE: str(file), PLUGINS: f"{held.__name__},{faults[PLUGINS]}"}
    training = command(recipe, folder, 2, *WORDS)[1:]
    secret = tmp_path / "secret"
    secret.write_text("that of this run and its workers")
    secret.chmod(0o600)
    training += ["--secret-file", str(secret)]
    comes = ("-m", "firecaffe", "train", recipe, *WORDS, "--secret-file", secret, "--join")

    def has(kind: str, learner: int) -> bool:
        return any((row["event"], row.get("learner")) == (kind, learner) for row in events(folder))

    with Typed(*training, environment={**faults, **hold}) as run:
        place = place_in(run)
        with Typed(*comes, place, environment=environment("kill:rank=2,step=10")) as first:
            until(lambda: has("join", 2) and has("lose", 2))
            assert first.wait() == -9
        with Typed(*comes, place, "--synchrony.in_flight", "2") as second:
            until(lambda: has("join", 3) and has("lose", 1))
            stranger = firecaffe("train", recipe, *WORDS, "--join", place)
            assert stranger.returncode == LaunchError.exit_code
            assert "the run there has a secret" in stranger.stderr
            other = firecaffe(*comes[2:-1], "--train.steps", "17", "--join", place)
            assert other.returncode == AgreementError.exit_code
            assert "train.steps is 17 here and 16 in the run" in other.stderr
            file.touch()
            said, errors = run.communicate()
            assert run.wait() == 0, errors
            told, errors = second.communicate()
            assert second.wait() == 0, errors
            assert told.splitlines()[-1] == f"the run ended after step {STEPS}"
    assert "rank 2 on" in said
    check_whole(folder, {"1", "2"}, STEPS)
    assert {each["work"][0] for each in events(folder) if each["event"] == "push"} >= {0, 2, 3}


def test_where_nobody_takes_workers(recipe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        patch.object(joining, "ANSWER_S", 0.1),
        pytest.raises(LaunchError, match=rf"--join {place}: no run answers there"),
    ):
        main([str(recipe), "--join", place])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = f"127.0.0.1:{store.port}"
    with pytest.raises(LaunchError, match="the run there takes no workers now"):
        main([str(recipe), "--join", place])
    with pytest.raises(RecipeError, match="workers come to runs that have a server"):
        main([str(recipe), "--join", place, "--synchrony.mode", "every_step"])
    with pytest.raises(RecipeError, match="--resume with --join, which starts one worker"):
        main([str(recipe), "--join", place, "--resume", "run"])
