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

import pytest
import torch

import firecaffe.runs.environment as environment
from firecaffe.errors import RunError
from firecaffe.files import written_together
from firecaffe.runs.environment import cpu_name, describe_environment
from firecaffe.runs.run_folder import RunConfig, create_run_folder, read_run_file


def test_a_named_folder_is_made_once(tmp_path: Path) -> None:
    config = RunConfig(folder=str(tmp_path / "deep" / "run"))
    folder = create_run_folder(config, "lenet-2w")
    assert folder == tmp_path / "deep" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "timings"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, said in (
        ("deep/run", "deep/run exists already"),
        ("empty", "exists already"),
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
    with pytest.raises(RunError, match="did not finish, or this is no run"):
        read_run_file(tmp_path, "result.json")
    for content, said in (
        (b"", "cannot be read"),
        (b'{"steps": 5', "cannot be read"),
        (b"[1, 2]", "expected object, got array"),
        (b"\xff\xfe", "cannot be read"),
    ):
        (tmp_path / "result.json").write_bytes(content)
        with pytest.raises(RunError, match=said) as caught:
            read_run_file(tmp_path, "result.json")
        assert "\n" not in str(caught.value)


def write(paths: list[Path], content: bytes) -> None:
    with written_together(paths) as asides:
        for aside in asides:
            aside.write_bytes(content)


def refuses(*_: Path) -> None:
    raise PermissionError("no links here")


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_all_or_none(
    place: int, has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """place: of a file that cannot get its name."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuses)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    write(paths[1:2], b"before")
    blocked = paths[place]
    blocked.unlink(missing_ok=True)
    blocked.mkdir()
    with pytest.raises(IsADirectoryError):
        write(paths, b"after")
    assert {each.name for each in tmp_path.iterdir()} == {"b", blocked.name}
    assert blocked.is_dir()
    assert place == 1 or paths[1].read_bytes() == b"before"
    blocked.rmdir()
    write(paths, b"after")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys(
        paths, b"after"
    )


def test_facts() -> None:
    facts = describe_environment()
    names = "host cpu cores memory_bytes gpus python torch cuda cpu_capability firecaffe"
    assert {*facts} == {*names.split(), "commit", "source", "command"}
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version()
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["command"] == sys.argv
    assert facts["cpu"]


def test_the_processor_of_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert cpu_name() == (platform.processor() or platform.machine())


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the module in firecaffe/runs/ below an empty folder."""
    package = tmp_path / "firecaffe" / "runs"
    package.mkdir(parents=True)
    shutil.copy(environment.__file__, package)
    return package


def source_of(package: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    return environment.source_digest.__wrapped__()


def test_the_source_has_a_digest_without_git(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an installed copy as of a checkout: what Python leaves beside does not count."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(installed.parent, elsewhere)
    first = source_of(installed, monkeypatch)
    assert len(first) == 64
    (installed / "__pycache__").mkdir()
    (installed / "__pycache__" / "environment.cpython-311.pyc").touch()
    assert source_of(installed, monkeypatch) == source_of(elsewhere / "runs", monkeypatch) == first
    (installed / "new.py").write_text("x = 1\n")
    with_one = source_of(installed, monkeypatch)
    (installed / "new.py").rename(installed / "other.py")
    assert len({first, with_one, source_of(installed, monkeypatch)}) == 3


def commit_of(package: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    return environment.commit.__wrapped__()


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *name, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_no_commit_outside_or_without_git(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(installed, monkeypatch) == ""
    git(installed, "init", "-q")
    monkeypatch.setenv("PATH", str(installed))
    assert commit_of(installed, monkeypatch) == ""


def test_the_commit_and_a_mark_for_changes(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = installed.parent.parent
    git(root, "init", "-q")
    # A repository that merely holds an installed copy says nothing about it.
    (root / "other").touch()
    git(root, "add", "other")
    git(root, "commit", "-qm", "other")
    assert commit_of(installed, monkeypatch) == ""

    git(root, "add", ".")
    git(root, "commit", "-qm", "all")
    head = git(root, "rev-parse", "HEAD")
    assert commit_of(installed, monkeypatch) == head[:12]
    (root / "other").write_text("changed, but no file of the package")
    assert commit_of(installed, monkeypatch) == head[:12]
    (installed.parent / "new.py").touch()
    assert commit_of(installed, monkeypatch) == head[:12] + "+"
