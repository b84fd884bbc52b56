"""Memory that ran out has one code, in whatever form it is told, and however deep."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.kit.small_run import RECIPE
from firecaffe.cli import main
from firecaffe.errors import CheckpointError, OwnCodeError, PeerLostError, memory_full
from firecaffe.runs.fault import kind_of
from tests.typed import python

UNDER_A_LIMIT = """
import resource, sys
import firecaffe.cli.train
from firecaffe.cli import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


FULL = {
    "python": MemoryError(),
    "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory"),
    "mmap": OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    "mapped file": RuntimeError(
        "unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)"
    ),
    "library": ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    "thread": RuntimeError("can't start new thread"),
    "own code": caused(OwnCodeError("NET raised MemoryError"), MemoryError()),
    "checkpoint": caused(CheckpointError("x: cannot be read"), OSError(errno.ENOMEM, "full")),
}


@pytest.mark.parametrize("name", FULL)
def test_one_code_for_all(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise FULL[name]

    monkeypatch.setattr("firecaffe.cli.schedule.main", fails)
    assert kind_of(FULL[name]) == "out_of_memory"
    assert main(["schedule", "tree", "4"]) == 14
    (line,) = capsys.readouterr().err.splitlines()
    assert "memory" in line


def test_what_numpy_and_torch_really_raise() -> None:
    for ask in (lambda: np.empty(10**15, np.uint8), lambda: torch.empty(10**15)):
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            ask()
        assert memory_full(caught.value) is not None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("shapes differ"),
        CheckpointError("the file says: out of memory"),  # a stranger's words
        PeerLostError("rank 1 ran out of memory"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert memory_full(error) is None


def test_a_rank_under_a_limit(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    # Several times what is allowed for one layer's outputs: if little is missing, it may be a new
    # thread that does not get it, and then the C library ends the process itself, with 127.
    sizes = "--train.global_batch_size", "8192", "--train.micro_batch_size", "8192"
    words = "train", recipe, "--run.folder", tmp_path / "run", *sizes
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    done = python("-c", UNDER_A_LIMIT, *words, environment=rank)
    assert done.returncode == 14, done.stderr
    assert "out of memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
