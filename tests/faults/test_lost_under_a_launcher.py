"""Workers of a server that are lost under a launcher: it lets them go, and the others go on. And a
worker that comes to a run that is there, computes as its ranks do, and may be lost as they may.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import command
from firecaffe.cli.train import main
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.cluster.secret import SECRET
from firecaffe.cluster.world import World
from firecaffe.errors import AgreementError, LauncherLostError, LaunchError, RecipeError
from firecaffe.faults import KINDS
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.training.plugins import VARIABLE as PLUGINS
from firecaffe.training.verification import replay
from tests.faults import held
from tests.faults.runs import SERVED, lines_of_ours, meeting, read, write_recipe
from tests.loopback import free_port
from tests.typed import Typed, firecaffe, python
from tests.unit.cluster.watches import until

STEPS = 12
WORDS = ("--train.steps", str(STEPS), "--checkpoint.every", "4")
HOST = os.uname().nodename
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"), SERVED)


def check_whole(folder: Path, lost: set[str], steps: int = STEPS) -> None:
    """That each sample came once, the lost ranks are counted, and the log gives the same bits."""
    row = read(folder / "result.json")["synchrony"]
    assert row["gradients"] == 6 * (steps - 2)
    assert row["lost_ranks"].keys() == lost
    assert row["lost_learners"] == len(lost)
    assert replay(folder, recipe_of_run(folder), ALONE).is_same


def test_its_exit_code_is_that_of_the_rest(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    faults = ["kill:rank=1,step=5", "freeze:rank=2,step=5", "exception:rank=3,step=5"]
    steps = 60  # long enough that on a busy host each rank has a part of step 5 or later
    training = command(recipe, folder, 4, *WORDS, "--train.steps", str(steps))[1:]
    done = python(*training, environment=environment(*faults))
    assert done.returncode == 0, done.stderr
    lines = lines_of_ours(done.stderr)
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
    assert replay(folder, recipe_of_run(folder), ALONE).is_same


def test_a_launcher_without_ranks_waits_for_the_others(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    training = command(recipe, folder, 1, *WORDS, *meeting(free_port(), "lost"))[1:]
    faults = environment("kill:rank=1,step=5") | {SECRET: "that of these two hosts"}
    with (
        Typed(*training, environment=faults) as first,
        Typed(*training, environment=faults) as second,
    ):
        said = [first.communicate(), second.communicate()]
        assert [first.wait(), second.wait()] == [0, 0], said
    # Who of the two has rank 1 is the store's choice.
    (line,) = [line for _, errors in said for line in errors.splitlines()]
    assert line.startswith(f"firecaffe: rank 1 on {HOST}")
    assert line.endswith("SIGKILL (seen by its launcher); the others go on")
    check_whole(folder, {"1"})


def place_in(run: Typed) -> str:
    """Where workers may come, as the run says it."""
    for line in run.stdout:
        if found := re.search(r"--join (\S+)", line):
            return found[1]
    raise AssertionError("the run does not say it")


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def test_one_that_comes_computes_beside_those_that_are_left(tmp_path: Path) -> None:
    """Rank 1 is killed. One comes and is killed too; another comes and stays. Rank 0 is held
    meanwhile. The second has the run's `in_flight`, not its own.
    """
    folder, file, steps = tmp_path / "run", tmp_path / "go on", 16
    words = ("--train.steps", str(steps))
    recipe = write_recipe(tmp_path, SERVED.replace("2.0", "20.0"))  # rank 0 is held
    faults = environment("kill:rank=1,step=4")
    # The last is asked first: a slow rank 1 may have no work before the step that is held.
    hold = {held.STEP: "8", held.FILE: str(file), PLUGINS: f"{held.__name__},{faults[PLUGINS]}"}
    training = command(recipe, folder, 2, *words)[1:]
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("that of this run and its workers")
    training += ["--secret-file", str(secret)]
    comes = ("-m", "firecaffe", "train", recipe, *words, "--secret-file", secret, "--join")

    def has(kind: str, learner: int) -> bool:
        return any((row["event"], row.get("learner")) == (kind, learner) for row in events(folder))

    with Typed(*training, environment={**faults, **hold}) as run:
        place = place_in(run)
        with Typed(*comes, place, environment=environment("kill:rank=2,step=10")) as first:
            until(lambda: has("join", 2) and has("lose", 2))
            assert first.wait() == -9
        with Typed(*comes, place, "--synchrony.in_flight", "2") as second:
            until(lambda: has("join", 3) and has("lose", 1))
            stranger = firecaffe("train", recipe, *words, "--join", place)
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
            assert told.splitlines()[-1] == f"the run ended after step {steps}"
    assert "rank 2 on" in said
    check_whole(folder, {"1", "2"}, steps)
    assert {each["work"][0] for each in events(folder) if each["event"] == "push"} >= {0, 2, 3}


def test_where_nobody_takes_workers(recipe: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [str(recipe), "--join", f"127.0.0.1:{store.port}"]
    with pytest.raises(LaunchError, match="the run there takes no workers now"):
        main(words)
    with pytest.raises(RecipeError, match="workers come to runs that have a server"):
        main([*words, "--synchrony.mode", "every_step"])
    with pytest.raises(RecipeError, match="--resume with --join, which starts one worker"):
        main([*words, "--resume", "run"])


def test_a_rank_ends_whose_launcher_died_before_they_met() -> None:
    """The store that it waits for was the launcher's. Its time-out is five minutes."""
    code = (
        "import torch\n"
        "from firecaffe.cluster.groups import make_world\n"
        "make_world(torch.device('cpu'), 3600)"
    )
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = {"RANK": "1", "WORLD_SIZE": "2", LAUNCHED: str(2**30)}
    done = python("-c", code, environment={**place, **rank})
    assert done.returncode == LauncherLostError.exit_code
    assert len(lines_of_ours(done.stderr)) == 1


def test_hosts_of_torchrun_that_count_restarts_differently_meet() -> None:
    """A host that another one asks to restart does not count it."""
    code = (
        "import torch\n"
        "from firecaffe.cluster.groups import make_world\n"
        "make_world(torch.device('cpu'), 30)"
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    of_all |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, second = ({**of_all, "RANK": n, "TORCHELASTIC_RESTART_COUNT": n} for n in "01")
    with Typed("-c", code, environment=first) as other:
        assert python("-c", code, environment=second).returncode == 0
        assert other.wait() == 0
