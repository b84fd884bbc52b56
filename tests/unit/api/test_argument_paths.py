"""Paths: what is none is refused, and what is there is written over only if that is asked for."""

import re
import shutil
from errno import ENOSPC, EROFS
from pathlib import Path

import pytest

import firecaffe
from firecaffe.api.argument_checks import check_target, paths_of
from firecaffe.cluster.from_script import from_script
from firecaffe.errors import RecipeError, RunError
from firecaffe.files import atomic_replace
from firecaffe.planner.cluster import FOLDER, load_cluster
from tests.typed import refused

RECIPE = str(Path(__file__).parents[3] / "recipes" / "nin_small.toml")
COMMANDS = {
    "tune": ["tune", RECIPE, "--global-batch-size", "256", "--write"],
    "plan --write": ["plan", RECIPE, "--runs", "run", "--write"],
    "plan --html": ["plan", RECIPE, "--html"],
    "check": ["check", "--write"],
    "bench step": ["bench", "step", "--model", "lenet", "--write"],
    "bench data": ["bench", "data", "photos", "--write"],
    "compare": ["compare", "a", "b", "--by", "recipe", "--html"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_writes_refuses(name: str, tmp_path: Path) -> None:
    """Before, `plan`, `check`, `bench` and `compare` wrote over it, and only `tune` refused."""
    suffix = "html" if name in ("compare", "plan --html") else "toml"
    path = tmp_path / f"there.{suffix}"
    path.write_text("mine")
    (line,) = refused(8, *COMMANDS[name], path).splitlines()
    assert str(path) in line
    assert "--overwrite" in line
    assert path.read_text() == "mine"


def test_a_target_is_checked(tmp_path: Path) -> None:
    there = tmp_path / "there.toml"
    there.touch()
    check_target("--write", "", overwrite=False)
    check_target("--write", str(tmp_path / "new.toml"), overwrite=False, suffixes=(".toml",))
    check_target("--write", str(there), overwrite=True)
    with pytest.raises(RecipeError, match=re.escape("must end in .png or .html")):
        check_target("--plot", str(there), overwrite=True, suffixes=(".png", ".html"))
    with pytest.raises(RunError, match="there is no folder"):
        check_target("--write", str(tmp_path / "no" / "x.toml"), overwrite=True)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(RunError, match="is a folder"):
        check_target("--write", str(tmp_path / "folder.toml"), overwrite=True)


@from_script
def write(path: Path, errno: int) -> None:
    with atomic_replace(path) as aside:
        raise OSError(errno, "said", *([str(aside)] if errno == EROFS else []))


def test_a_target_that_takes_no_file_is_named_before_the_work(tmp_path: Path) -> None:
    target = tmp_path / ("long" * 62 + ".toml")  # a name of 253; that of the file aside is too long
    with pytest.raises(RunError, match=re.escape(f"--write {target}: ")) as refusal:
        check_target("--write", str(target), overwrite=False)
    assert ".partial" not in str(refusal.value)
    check_target("--write", str(tmp_path / "new.toml"), overwrite=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("errno", [ENOSPC, EROFS])
def test_a_write_that_fails_is_an_error_of_ours(errno: int, tmp_path: Path) -> None:
    """A full disk says no name; a file aside has one that the user does not know."""
    target = tmp_path / "out.bin"
    with pytest.raises(RunError, match=re.escape(str(target))) as refusal:
        write(target, errno)
    assert ".partial" not in str(refusal.value)
    assert refusal.value.exit_code == 8


@pytest.mark.parametrize("value", ["", "a\0b", 3, [Path("a"), "b\0"]])
def test_what_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(RecipeError, match="runs is "):
        paths_of("runs", value)


def test_a_cluster_file_may_have_a_comma_in_its_path(tmp_path: Path) -> None:
    mine = tmp_path / "titan, mine.toml"
    shutil.copy(FOLDER / "titan.toml", mine)
    for cluster in (mine, [mine], [str(mine), "titan"]):
        planned = firecaffe.plan(model="lenet", workers=1, cluster=cluster)
        assert planned.plans[0].cluster.name == load_cluster(str(mine)).name
    named = firecaffe.plan(model="lenet", workers=1, cluster="titan,ethernet-1g")
    assert [plan.cluster.name for plan in named.plans] == ["titan", "ethernet-1g"]
