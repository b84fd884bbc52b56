"""Two hosts that share no disk: each sees a folder of its own under the same path."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.faults.on_purpose import environment
from benchmarks.kit.small_run import RECIPE, command, state_of, steps_of
from firecaffe.cluster.secret import SECRET
from tests.faults.runs import meeting, read
from tests.loopback import free_port
from tests.typed import Typed, firecaffe, python

HOST = """
import ctypes, os, runpy, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(done):
    if done:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
PRIVATE, BIND = 0x44000, 0x1000
call(libc.unshare(0x20000))
call(libc.mount(b"none", b"/", None, PRIVATE, None))
call(libc.mount(sys.argv[1].encode(), sys.argv[2].encode(), None, BIND, None))
os.chdir(sys.argv[2])
sys.argv = ["firecaffe", *sys.argv[3:]]
runpy.run_module("firecaffe", run_name="__main__", alter_sys=True)
"""
"""`firecaffe WORDS…` on a host whose disk is argv[1], which it sees as argv[2]."""

STEPS = 12


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    """The disks of two hosts, with the recipe on both, and where they are seen."""
    if os.geteuid() != 0:
        pytest.skip(f"a host with its own files needs root; this is uid {os.geteuid()}")
    found = [tmp_path / name for name in ("a", "b", "disk")]
    for each in found:
        each.mkdir()
        (each / "recipe.toml").write_text(RECIPE)
    return found


def on_both(disks: list[Path], *words: str, faults: dict[str, str]) -> list[tuple[str, str]]:
    """What a launcher on each of the two says, once both have ended well."""
    *own, seen = disks
    recipe, where = seen / "recipe.toml", meeting(free_port(), "apart")
    training = command(recipe, Path("run"), 1, *words, *where)[3:]
    secret = {SECRET: "that of these two hosts"}
    with (
        Typed("-c", HOST, own[0], seen, *training, environment=faults | secret) as a,
        Typed("-c", HOST, own[1], seen, *training, environment=faults | secret) as b,
    ):
        said = [a.communicate(), b.communicate()]
        assert [a.wait(), b.wait()] == [0, 0], said
    return said


def test_each_host_has_its_own_folder_and_a_restart_goes_on(disks: list[Path]) -> None:
    """With what ranks hold in parts, from a checkpoint that one host has, to the same bits."""
    words = ["--train.steps", str(STEPS), "--checkpoint.every", "4"]
    words += ["--exchange.compressor", "top_k", "--max-restarts", "1"]
    said = on_both(disks, *words, faults=environment("kill:rank=1,step=10"))
    is_first = [(disk / "run" / "result.json").is_file() for disk in disks[:2]]
    assert sorted(is_first) == [False, True]  # which host has rank 0 is the store's choice
    first, other = (disks[is_first.index(each)] / "run" for each in (True, False))
    assert steps_of(first) == list(range(1, STEPS + 1))
    assert not (other / "checkpoints").exists()
    for rank, folder in enumerate((first, other)):
        (rows,) = (folder / "timings").glob("rank-*.jsonl")
        assert rows.name == f"rank-{rank}.jsonl"
        steps = [json.loads(line)["step"] for line in rows.read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))
        assert read(folder / "fault.json")["rank"] == 1
    seen = disks[2] / "run"
    (told,) = {line for line in said[is_first.index(True)][0].splitlines() if "alone, for" in line}
    assert f"checkpoints are in {seen}/checkpoints on " in told
    assert f"keeps the timings of rank 1 in {seen}" in told
    assert "could not be written" not in "".join(errors for _, errors in said)

    explained = firecaffe("explain", first)
    assert explained.returncode == 0, explained.stderr
    assert f"timings of rank 1 are on {os.uname().nodename}" in explained.stdout

    alone = disks[2] / "alone"
    done = python(*command(disks[2] / "recipe.toml", alone, 1, *words)[1:])
    assert done.returncode == 0, done.stderr
    assert state_of(alone) == state_of(first)
