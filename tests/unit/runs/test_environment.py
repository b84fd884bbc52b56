"""Facts of the host and of the code."""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import firecaffe.runs.environment as environment
from firecaffe.runs.environment import cpu_name, describe_environment


def test_facts() -> None:
    facts = describe_environment()
    assert set(facts) == {
        "host",
        "cpu",
        "cores",
        "memory_bytes",
        "gpus",
        "python",
        "torch",
        "cuda",
        "cpu_capability",
        "firecaffe",
        "commit",
        "source",
        "command",
    }
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
    (installed.parent / "recipes").mkdir()
    (installed.parent / "recipes" / "lenet.toml").touch()  # a link in a checkout, which is no code
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


def test_no_commit_outside_of_git(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(installed, monkeypatch) == ""


def test_no_commit_without_git(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
