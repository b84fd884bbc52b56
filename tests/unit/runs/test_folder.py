"""A run's folder belongs to one run; files that belong together are all new or all as before; facts
of the host and of the code.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import firecaffe.runs.environment as environment
from firecaffe.errors import RunError
from firecaffe.files import replace_together
from firecaffe.runs.environment import cpu_name, describe_environment
from firecaffe.runs.run_folder import RunConfig, create_run_folder, read_run_file


def test_a_named_folder_is_made_once(tmp_path: Path) -> None:
    folder = create_run_folder(RunConfig(folder=str(tmp_path / "deep" / "run")), "lenet-2w")
    assert folder == tmp_path / "deep" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "timings"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "over").mkdir()
    (tmp_path / "over" / "result.json").touch()
    for name, said in (
        ("deep/run", "deep/run exists already"),
        ("empty", "exists already; "),
        ("over", "a run that is over"),
        ("file/run", "file/run: Not a directory"),
    ):
        with pytest.raises(RunError, match=rf"run\.folder .*{said}"):
            create_run_folder(RunConfig(folder=str(tmp_path / name)), "x")
    assert list((tmp_path / "empty").iterdir()) == []


def test_automatic_names_of_the_same_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    strftime = time.strftime
    moment = time.struct_time((2026, 7, 4, 9, 5, 3, 5, 185, 0))
    monkeypatch.setattr(time, "strftime", lambda form: strftime(form, moment))
    made = [create_run_folder(RunConfig(), "lenet-2w") for _ in range(3)]
    name = "20260704-090503-lenet-2w"
    assert made == [Path("runs") / f"{name}{suffix}" for suffix in ("", "-2", "-3")]
    assert all((tmp_path / folder / "timings").is_dir() for folder in made)


def test_a_run_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run"):
        read_run_file(tmp_path / "nowhere", "result.json")
    for content, said in (
        (None, "did not finish, or this is no run"),
        (b"", "cannot be read"),
        (b'{"steps": 5', "cannot be read"),
        (b"[1, 2]", "expected object, got array"),
        (b"\xff\xfe", "cannot be read"),
    ):
        if content is not None:
            (tmp_path / "result.json").write_bytes(content)
        with pytest.raises(RunError, match=rf"\A.*{said}.*\Z"):  # in one line
            read_run_file(tmp_path, "result.json")


def write(paths: list[Path], content: bytes) -> None:
    with replace_together(paths) as asides:
        for aside in asides:
            aside.write_bytes(content)


def refuse(*_: object, **__: object) -> Any:
    raise PermissionError("not here")


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_all_or_none(
    place: int, has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """place: of a file that cannot get its name."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    write(paths[1:2], b"before")
    blocked = paths[place]
    blocked.unlink(missing_ok=True)
    blocked.mkdir()
    with pytest.raises(IsADirectoryError):
        write(paths, b"after")
    assert {path.name for path in tmp_path.iterdir()} == {"b", blocked.name}
    assert blocked.is_dir()
    assert place == 1 or paths[1].read_bytes() == b"before"
    blocked.rmdir()
    write(paths, b"after")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(
        "abc", b"after"
    )


def test_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe_environment()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["torch"], facts["python"]) == (torch.__version__, platform.python_version())
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["command"] == sys.argv
    assert facts["cpu"]
    monkeypatch.setattr(Path, "read_text", refuse)  # of a system that does not say
    assert cpu_name() == (platform.processor() or platform.machine())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module in firecaffe/runs/ below an empty folder, which is read for its own."""
    package = tmp_path / "firecaffe" / "runs"
    package.mkdir(parents=True)
    shutil.copy(environment.__file__, package)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    return package


def test_the_source_has_a_digest_without_git(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an installed copy as of a checkout: what Python leaves beside does not count."""
    digest = environment.source_digest.__wrapped__
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(installed.parent, elsewhere)
    first = digest()
    assert len(first) == 64
    (installed / "__pycache__").mkdir()
    (installed / "__pycache__" / "environment.cpython-311.pyc").touch()
    with monkeypatch.context() as patch:
        patch.setattr(environment, "__file__", str(elsewhere / "runs" / "environment.py"))
        assert digest() == first
    assert digest() == first
    new = installed.parent / "new.py"
    new.write_text("x = 1\n")
    with_one = digest()
    new.rename(installed / "new.py")
    assert len({first, with_one, digest()}) == 3


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_a_mark_for_changes(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository that merely holds an installed copy says nothing about it."""
    commit = environment.commit.__wrapped__
    assert commit() == ""
    git(tmp_path, "init", "-q")
    (tmp_path / "other").touch()
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "other")
    assert commit() == ""
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit() == head[:12]
    (tmp_path / "other").write_text("changed, but no file of the package")
    assert commit() == head[:12]
    (installed.parent / "new.py").touch()
    assert commit() == head[:12] + "+"
    monkeypatch.setenv("PATH", str(installed))  # where there is no git
    assert commit() == ""
