"""`firecaffe replay RUN` and `firecaffe verify RUN`: what they say, and how they end."""

import json
import shutil
from pathlib import Path

import pytest

from firecaffe.api.verify_and_replay import line
from firecaffe.cli import main
from firecaffe.training.verification import Verified
from tests.cli.stale_run import train_stale
from tests.typed import refused, said_by


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_stale(tmp_path_factory.mktemp("stale") / "run")


def test_a_replay_of_the_same(run: Path, tmp_path: Path) -> None:
    out = said_by("replay", run, "--to", str(tmp_path / "again")).splitlines()
    assert len(out) == 1
    # The version counts the warm step.
    assert out[0].startswith("same: 9 updates of 3 steps; weights ")
    assert (tmp_path / "again" / "checkpoints" / "step-00000003").is_dir()
    assert main(["replay", str(run), "--to", str(tmp_path / "again")]) == 8


def test_what_differs_from_a_replay_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_what_cannot_be_replayed(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    lines = (copy / "events.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "events.jsonl").write_bytes(b"".join([*lines[:4], *lines[5:]]))
    assert "events.jsonl line 5: is not what was written" in refused(8, "replay", copy)
    (copy / "events.jsonl").unlink()
    assert "No such file" in refused(8, "replay", copy)
    assert main(["replay", str(tmp_path / "none")]) == 8
    assert main(["replay"]) == 2


ALONE = {"replay": [], "predict": [], "verify": [], "bench": ["step", "--model", "lenet"]}
"""Commands that are one process, and what is typed where no run is."""


@pytest.mark.parametrize("command", ALONE)
def test_one_of_several_ranks_does_not_do_all_of_it(
    run: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    (line,) = refused(6, command, *(ALONE[command] or [str(run)])).splitlines()
    assert "computes in one process, and this one was started as rank 0 of 2" in line


def test_first_steps_of_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--steps", "2"]) == 0
    said = "same: 2 of 3 steps once more on one worker, 5 updates from the log of events; "
    assert capsys.readouterr().out == f"{said}compared 2 losses\n"
    assert main(["verify", str(run)]) == 0
    said = "compared 3 losses, every tensor after step 3, the weights after step 3, the result\n"
    assert capsys.readouterr().out.endswith(said)


def test_what_differs_from_its_first_steps_is_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_what_has_no_effect_is_refused(run: Path, words: list[str], code: int, said: str) -> None:
    (error,) = refused(code, "verify", run, *words).splitlines()
    assert said in error


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert "no recipe.toml; this is no run folder" in refused(8, "verify", tmp_path)


def test_many_steps_are_counted() -> None:
    found = Verified(1500, 600, 0, 600, [100, 200], [*range(1, 601)])
    assert line(found) == (
        "same: 600 of 1,500 steps once more on one worker; compared 600 losses, every tensor after "
        "600 steps, 1 to 600, the weights after steps 100, 200"
    )
