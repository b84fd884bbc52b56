"""`firecaffe replay RUN`: what it says, and how it ends."""

import shutil
from pathlib import Path

import pytest

from firecaffe.cli import main
from tests.cli.stale_run import train_stale


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_stale(tmp_path_factory.mktemp("replay") / "run")


def test_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--to", str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1
    # The version counts the warm step.
    assert out[0].startswith("same: 9 updates of 3 steps; weights ")
    assert (tmp_path / "again" / "checkpoints" / "step-00000003").is_dir()
    assert main(["replay", str(run), "--to", str(tmp_path / "again")]) == 8


def test_what_differs_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "result.json").read_text()
    try:
        (run / "result.json").write_text(
            text.replace('"weights_sha256": "', '"weights_sha256": "0')
        )
        assert main(["replay", str(run)]) == 7
    finally:
        (run / "result.json").write_text(text)
    error = capsys.readouterr().err
    assert "differs from its replay after step 3: weights; weights 0" in error
    assert len(error.splitlines()) == 1


def test_what_cannot_be_replayed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = (copy / "events.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "events.jsonl").write_bytes(b"".join([*lines[:4], *lines[5:]]))
    assert main(["replay", str(copy)]) == 8
    assert "events.jsonl line 5: is not what was written" in capsys.readouterr().err
    (copy / "events.jsonl").unlink()
    assert main(["replay", str(copy)]) == 8
    assert "No such file" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 8
    assert main(["replay"]) == 2


ALONE = {"replay": [], "predict": [], "bench": ["step", "--model", "lenet"]}
"""Commands that are one process, and what is typed where no run is."""


@pytest.mark.parametrize("command", ALONE)
def test_one_of_several_ranks_does_not_do_all_of_it(
    run: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([command, *(ALONE[command] or [str(run)])]) == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "computes in one process, and this one was started as rank 0 of 2" in line
