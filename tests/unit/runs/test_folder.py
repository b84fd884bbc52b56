"""A run's folder belongs to one run."""

import time
from pathlib import Path

import pytest

from firecaffe.errors import RunError
from firecaffe.runs.run_folder import RunConfig, create_run_folder, read_run_file


def test_a_named_folder_is_made_once(tmp_path: Path) -> None:
    config = RunConfig(folder=str(tmp_path / "deep" / "run"))
    folder = create_run_folder(config, "lenet-2w")
    assert folder == tmp_path / "deep" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "timings"]
    with pytest.raises(RunError, match=r"run\.folder .*deep/run exists already"):
        create_run_folder(config, "lenet-2w")


def test_an_empty_folder_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="exists already"):
        create_run_folder(RunConfig(folder=str(tmp_path)), "x")
    assert list(tmp_path.iterdir()) == []


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


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"run\.folder .*file/run: Not a directory"):
        create_run_folder(RunConfig(folder=str(tmp_path / "file" / "run")), "x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "did not finish, or this is no run"),
        ("", "cannot be read"),
        ('{"steps": 5', "cannot be read"),
        ("[1, 2]", "expected object, got array"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_run_that_cannot_be_read(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "result.json").write_bytes(raw)
    with pytest.raises(RunError, match=words) as caught:
        read_run_file(tmp_path, "result.json")
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no such run folder"):
        read_run_file(tmp_path / "nowhere", "result.json")
