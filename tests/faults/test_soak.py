"""The soak in short: a few kills at random moments, and the run ends in the undisturbed bits."""

from pathlib import Path

from benchmarks.small_run import RECIPE, command, steps_of
from firecaffe.training.plugins import VARIABLE as PLUGINS
from tests.typed import python


def test_a_few_kills() -> None:
    words = ["--kills", 2, "--steps", 60, "--workers", 2, "--seed", 5, "--pause", 2]
    done = python("-m", "benchmarks.soak", *words)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said
    assert all(line.endswith("right") for line in said)


def test_a_kill_between_the_folder_and_its_announcement(tmp_path: Path) -> None:
    """The next attempt goes on in it; another run does not."""
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    words = command(recipe, folder, 2, "--train.steps", "3", "--max-restarts", "1")[1:]
    plugin = {PLUGINS: "tests.faults.killed_at_its_folder"}
    done = python(*words, environment=plugin)
    assert done.returncode == 0, done.stderr
    assert "restart 1" in done.stderr
    assert steps_of(folder) == [1, 2, 3]
    again = python(*words)
    assert again.returncode != 0
    assert "exists already" in again.stderr
