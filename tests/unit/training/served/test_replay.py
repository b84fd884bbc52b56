"""A run's log alone gives its bits again: of every mode, finished or not, resumed or not."""

import shutil
from pathlib import Path

import pytest
import torch

from firecaffe.cluster.world import World
from firecaffe.errors import RunError
from firecaffe.recipe.recorded_recipe import recipe_of
from firecaffe.training.parts import Parts
from firecaffe.training.verification import Replayed, replay
from tests.unit.training.served.test_trainings import MODES, data, network, train

ALONE = World(0, 1, torch.device("cpu"))


def replayed(folder: Path, to: Path | None = None) -> Replayed:
    parts = Parts(network, train=data(300, 0), test=data(100, 1))
    return replay(folder, recipe_of(folder), ALONE, to, parts)


@pytest.mark.parametrize("name", MODES)
def test_the_same_digests(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(tmp_path / "run", MODES[name], steps=20)

    def refuse(*_: object) -> None:
        raise AssertionError("a clock was asked")

    monkeypatch.setattr("firecaffe.synchrony.clock.SimulatedClock.next", refuse)
    found = replayed(tmp_path / "run")
    assert found.is_same
    assert found.found.weights == result.weights_sha256
    assert found.found.state == result.state_sha256


def test_a_run_that_was_ended_is_replayed_to_its_checkpoint(tmp_path: Path) -> None:
    whole = train(tmp_path / "run", MODES["softsync"], steps=20)
    run = tmp_path / "run"
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000020")
    log = run / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-30])  # killed while it wrote a line
    found = replayed(run, tmp_path / "again")
    assert found.is_same
    assert found.found.step == 14
    # What is kept goes on as the run would have.
    again = train(
        tmp_path / "on", MODES["softsync"], run / "checkpoints" / "step-00000014", steps=20
    )
    assert again.state_sha256 == whole.state_sha256
    assert replayed(tmp_path / "on").is_same
    assert (tmp_path / "again" / "checkpoints" / "step-00000014").is_dir()
    with pytest.raises(RunError, match="exists already"):
        replayed(run, tmp_path / "again")


def test_other_events_or_data_are_other_bits(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, MODES["asynchronous"], steps=9)
    parts = Parts(network, train=data(300, 7), test=data(100, 1))
    assert not replay(run, recipe_of(run), ALONE, parts=parts).is_same
    train(other, {**MODES["asynchronous"], "speeds": "constant"}, steps=9)
    shutil.copy(other / "events.jsonl", run / "events.jsonl")
    found = replayed(run)
    assert not found.is_same
    assert found.found == replayed(other).recorded


def test_a_damaged_log_is_refused_with_its_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, MODES["backup"], steps=5)
    log = run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:20], lines[20].replace(b": ", b": 1", 2), *lines[21:]]))
    with pytest.raises(
        RunError, match=r"events\.jsonl line 21: (is not what was written|is not a log entry)"
    ):
        replayed(run)
    log.write_bytes(b"".join(lines[:40]))
    with pytest.raises(RunError, match=r"line 41: is not there; the run has gone on"):
        replayed(run)


def test_a_synchronous_run_has_none(tmp_path: Path) -> None:
    train(tmp_path / "run", {"mode": "every_step"}, steps=2)
    with pytest.raises(RunError, match="every_step writes no events"):
        replayed(tmp_path / "run")
