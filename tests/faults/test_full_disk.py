"""A disk that is really full: the run goes on, says so, and what was saved stays whole."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import firecaffe
from benchmarks.faults_on_purpose import environment
from benchmarks.small_run import RECIPE, command, state_of
from firecaffe import CheckpointConfig, RunConfig, SynchronyConfig
from firecaffe.errors import CheckpointError
from firecaffe.runs.record import JsonLines
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import read_rows
from firecaffe.training.checkpoint import load_newest
from tests.ranks.networks import Everything, small_data
from tests.ranks.test_measured_shares import RECIPE as MEASURED
from tests.typed import python
from tests.world import Ranks

CHECKPOINT_BYTES = 3_500_000

WORDS = ("--train.steps", "9", "--checkpoint.every", "2", "--checkpoint.keep_last", "0")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two checkpoints of LeNet and not for three. Skips where nothing can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={int(2.6 * CHECKPOINT_BYTES)}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "firecaffe-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_run_on_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    folder = small_disk / "run"
    done = python(*command(recipe, folder, 1, *WORDS)[1:])
    assert done.returncode == 4, done.stderr  # all steps done, but the last one is not on the disk
    for step in (6, 8):
        assert f"warning: checkpoint of step {step} not saved" in done.stdout
    assert "No space left on device" in done.stdout
    assert "test at step 9" in done.stdout
    assert "checkpoint of step 9 not saved" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (folder / "result.json").exists()
    newest, damaged = load_newest(folder)
    assert (newest.step, damaged) == (4, [])
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith(".")] == []

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for where, words in ((whole, []), (resumed, ["--resume", str(folder)])):
        python(*command(recipe, where, 1, *WORDS, *words)[1:]).check_returncode()
    assert state_of(whole) == state_of(resumed)


def test_the_rank_that_writes_is_blamed(small_disk: Path, tmp_path: Path) -> None:
    """Of two ranks, with curves; and no thread prints a traceback."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("tensorboard = false", "tensorboard = true"))
    folder = small_disk / "run"
    done = python(*command(recipe, folder, 2, *WORDS)[1:])
    assert done.returncode == 4, done.stderr
    (line,) = done.stderr.splitlines()
    assert "rank 0 on" in line
    assert "checkpoint of step 9 not saved" in line
    if (folder / "fault.json").exists():
        assert read_run_file(folder, "fault.json")["rank"] == 0
    else:
        assert f"{folder / 'fault.json'} could not be written" in line


def test_rows_wait_until_there_is_room_again(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with JsonLines(small_disk / "rows.jsonl") as rows:
        rows.write({"step": 0})
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(100_000)):
                    pass
            except OSError:
                pass
        for step in range(1, 2000):
            rows.write({"step": step, "padding": "x" * 20})
        filler.unlink()
        rows.write({"step": 2000})
    found = [row["step"] for row in list(read_rows(small_disk / "rows.jsonl", dict))]
    assert found == list(range(2001))


def fit_on_a_full_disk(folder: str) -> tuple[int, int]:
    """The rank that the error on this one blames, and its step."""
    os.environ.update(environment("disk_full:rank=0,step=9"))
    recipe = dataclasses.replace(
        MEASURED,
        synchrony=SynchronyConfig(),
        checkpoint=CheckpointConfig(every=2),
        run=RunConfig(folder=folder, tensorboard=False),
    )
    with pytest.raises(CheckpointError) as caught:
        firecaffe.train(recipe, Everything, small_data(100), small_data(30, 1))
    fault = caught.value.fault
    assert fault is not None
    return fault.rank, fault.step


def test_who_goes_along_blames_the_rank_that_writes(ranks: Ranks, tmp_path: Path) -> None:
    """And stays until it has heard of it, for the launcher ends all others when one leaves."""
    found = ranks.run(3, fit_on_a_full_disk, str(tmp_path / "run"))
    assert {rank for rank, _ in found} == {0}
