"""Where a run's secret comes from, and what is none."""

import os
from pathlib import Path

import pytest

from firecaffe.cluster.secret import SECRET, read_secret, secret_of
from firecaffe.errors import LaunchError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_file_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "of the environment")
    assert secret_of(written(tmp_path, "of a file, so to say\n"), one_host=False) == (
        b"of a file, so to say"
    )
    assert secret_of("", one_host=False) == b"of the environment"


def test_one_host_has_one_that_nobody_knows_and_several_need_the_same() -> None:
    assert len(secret_of("", one_host=True)) >= 32
    assert secret_of("", one_host=True) != secret_of("", one_host=True)
    with pytest.raises(LaunchError, match=rf"--secret-file FILE, or {SECRET}; make one with"):
        secret_of("", one_host=False)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(LaunchError, match=rf"mode {mode:04o}.*must be 0600"):
        read_secret(written(tmp_path, "x" * 40, mode))


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_what_is_too_short_is_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=f"holds {len(text.strip())} characters"):
        read_secret(written(tmp_path, text))
    monkeypatch.setenv(SECRET, text)
    with pytest.raises(LaunchError, match=f"{SECRET} holds"):
        secret_of("", one_host=True)


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no-file cannot be read: No such file"):
        read_secret(str(tmp_path / "no-file"))
    with pytest.raises(LaunchError, match=r"Is a directory|not a regular file"):
        read_secret(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(LaunchError, match="not a regular file"):
        read_secret(str(tmp_path / "pipe"))
    path = written(tmp_path, "")
    Path(path).write_bytes(b"\xff" * 40)
    with pytest.raises(LaunchError, match="cannot be read"):
        read_secret(path)
