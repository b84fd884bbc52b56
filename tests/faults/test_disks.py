"""A disk that is really full, or slower than ranks may be: the run goes on, says so, and what was
saved stays whole.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path

import pytest

from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import RECIPE, command, state_of
from firecaffe import CheckpointConfig, ExchangeConfig, Recipe, TrainConfig
from firecaffe.cluster.world import World
from firecaffe.errors import CheckpointError
from firecaffe.runs.record import JsonLines
from firecaffe.runs.run_folder import read_run_file
from firecaffe.schema import read_rows
from firecaffe.training import build_training as build
from firecaffe.training import loop, saver
from firecaffe.training.checkpoint import Checkpoint, load_newest
from firecaffe.training.saver import Write
from tests.kit.worlds import EVERYTHING, changed
from tests.ranks.test_invariance import RECIPE as INVARIANT
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
    """Of two ranks, with curves: the one that writes is blamed, and no thread has a traceback."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.replace("tensorboard = false", "tensorboard = true"))
    folder = small_disk / "run"
    done = python(*command(recipe, folder, 2, *WORDS)[1:])
    assert done.returncode == 4, done.stderr  # all steps done, but the last one is not on the disk
    for step in (6, 8):
        assert f"warning: checkpoint of step {step} not saved" in done.stdout
    assert "No space left on device" in done.stdout
    assert "test at step 9" in done.stdout
    (line,) = done.stderr.splitlines()
    assert "rank 0 on" in line
    assert "checkpoint of step 9 not saved" in line
    is_written = (folder / "fault.json").exists()
    assert is_written or f"{folder / 'fault.json'} could not be written" in line
    assert not is_written or read_run_file(folder, "fault.json")["rank"] == 0
    assert not (folder / "result.json").exists()
    newest, damaged = load_newest(folder)
    assert (newest.step, damaged) == (4, [])
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.name.startswith(".")] == []

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for where, words in ((whole, []), (resumed, ["--resume", str(folder)])):
        python(*command(recipe, where, 1, *WORDS, *words)[1:]).check_returncode()
    assert state_of(whole) == state_of(resumed)


EXPORTS = """
import sys
from pathlib import Path
import torch
from firecaffe.training.export_file import FORMATS
network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 500))
for name in ("safetensors", "torch_export"):
    try:
        FORMATS[name].write(network, torch.zeros(2, 1, 28, 28), Path(sys.argv[1], name))
    except OSError as error:
        print(error.errno, Path(error.filename).name)
"""


def test_an_export_to_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "filled").write_bytes(bytes(int(2.5 * CHECKPOINT_BYTES)))
    script = tmp_path / "exports.py"
    script.write_text(EXPORTS)
    done = python(script, small_disk)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{ENOSPC} safetensors", f"{ENOSPC} torch_export"]
    assert [path.name for path in small_disk.iterdir()] == ["filled"]


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
    rows_there = read_rows(small_disk / "rows.jsonl", dict)
    assert [row["step"] for row in rows_there] == list(range(2001))


def fit_on_a_full_disk(recipe: Recipe, folder: Path) -> int:
    """The rank that the error on this one blames."""
    os.environ.update(environment("disk_full:rank=0,step=9"))
    with pytest.raises(CheckpointError) as caught:
        EVERYTHING(recipe, folder)
    assert caught.value.fault is not None
    return caught.value.fault.rank


def test_who_goes_along_blames_the_rank_that_writes(ranks: Ranks, tmp_path: Path) -> None:
    """And stays until it has heard of it, for the launcher ends all others when one leaves."""
    recipe = changed(INVARIANT, train={"steps": 9}, checkpoint=CheckpointConfig(every=2))
    assert ranks.run(3, fit_on_a_full_disk, recipe, tmp_path / "run") == [0] * 3


SLOW_S = 4.0
"""The time that the disk takes for one: several times the time-out."""


def train_on_a_slow_disk(recipe: Recipe, folder: Path) -> None:
    """The first checkpoint, and the last, are not taken before a while."""
    never = threading.Event()

    def slowly(_: object, write: Write, world: World) -> Write:
        def written(where: Path, checkpoint: Checkpoint) -> Path:
            if checkpoint.step in (2, 12):
                never.wait(SLOW_S)
            return write(where, checkpoint)

        return written

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "around_write", slowly)
        patched.setattr(loop, "PATIENCE_S", saver.ROUND_S)
        EVERYTHING(recipe, folder)


def test_a_slow_disk_is_no_stuck_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Nobody is called stuck, and what is not urgent is put off."""
    recipe = Recipe(
        train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=12),
        exchange=ExchangeConfig(timeout_s=1.0),
        checkpoint=CheckpointConfig(every=2, keep_last=0),
    )
    ranks.run(2, train_on_a_slow_disk, recipe, tmp_path / "run")
    saved = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert {"step-00000002", "step-00000012"} <= saved
    assert read_run_file(tmp_path / "run", "result.json")["checkpoints"]["put_off"] >= 1
    assert not (tmp_path / "run" / "fault.json").exists()
