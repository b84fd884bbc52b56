"""`firecaffe verify RUN`: what it says, and how it ends."""

import json
from pathlib import Path

import pytest

from firecaffe.api.verify_and_replay import line
from firecaffe.cli import main
from firecaffe.training.verification import Verified
from tests.cli.stale_run import train_stale


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_stale(tmp_path_factory.mktemp("verify") / "run")


def test_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--steps", "2"]) == 0
    said = "same: 2 of 3 steps once more on one worker, 5 updates from the log of events; "
    assert capsys.readouterr().out == f"{said}compared 2 losses\n"
    assert main(["verify", str(run)]) == 0
    said = "compared 3 losses, every tensor after step 3, the weights after step 3, the result\n"
    assert capsys.readouterr().out.endswith(said)


def test_what_differs_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "metrics.jsonl"
    text = path.read_text()
    rows = [json.loads(each) for each in text.splitlines()]
    rows[1]["loss"] = 2.5
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["verify", str(run)]) == 7
    finally:
        path.write_text(text)
    (error,) = capsys.readouterr().err.splitlines()
    assert "differs from its steps on one worker in step 2: loss 2.5 in metrics" in error


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--nproc-per-node", "1,2"], 2, "--nproc-per-node: verify RUN trains on one worker"),
        (["--steps", "0"], 2, "--steps is 0; it must be at least 1"),
        (["--train.seed", "3"], 2, "--train.seed has no effect on verify"),
    ],
)
def test_what_has_no_effect_is_refused(
    run: Path, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run), *words]) == code
    (error,) = capsys.readouterr().err.splitlines()
    assert said in error


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 8
    assert "no recipe.toml; this is no run folder" in capsys.readouterr().err


def test_one_of_several_ranks(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", str(run)]) == 6
    assert "verify RUN computes in one process" in capsys.readouterr().err


def test_many_steps_are_counted() -> None:
    found = Verified(1500, 600, 0, 600, [100, 200], [*range(1, 601)])
    assert line(found) == (
        "same: 600 of 1,500 steps once more on one worker; compared 600 losses, every tensor after "
        "600 steps, 1 to 600, the weights after steps 100, 200"
    )
