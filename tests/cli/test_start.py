"""Starts of Python as users have them, each loading torch itself: a locale that knows ASCII alone,
a folder with files named as libraries, and a system without what Linux alone has.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from firecaffe.training.trial import command_of

NETWORK = """
from torch import nn


def make(num_classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(784 * in_channels, num_classes))
"""

RECIPE = """
[model]
name = "networks_of_mine:make"  # für alle
[data]
name = "generated"
[train]
global_batch_size = 8
micro_batch_size = 4
steps = 1
eval_batch_size = 1000
[run]
folder = "Läufe/eins"
tensorboard = false
"""

ASCII_ALONE = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(
    not sys.prefix.isascii(), reason="such a Python cannot start in a folder that is not ASCII"
)
def test_a_folders_files_are_not_imported_for_libraries_and_names_are_utf8(tmp_path: Path) -> None:
    """`python -m firecaffe` puts the folder first, which then comes last for it and its ranks; the
    encoding is chosen when a Python starts.
    """
    here = tmp_path / "Größe"
    here.mkdir()
    for name in ("random", "torch", "json", "numpy"):
        code = f"open('ran-{name}', 'w')\nraise SystemExit('{name}.py of this folder')\n"
        (here / f"{name}.py").write_text(code)
    (here / "networks_of_mine.py").write_text(NETWORK)
    (here / "für.toml").write_text(RECIPE, encoding="utf-8")
    command = [sys.executable, "-m", "firecaffe", "train", "für.toml", "--nproc-per-node", "2"]
    environment = {**os.environ, **ASCII_ALONE}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, check=False)
    assert not [path.name for path in here.glob("ran-*")]
    assert done.returncode == 0, done.stderr.decode()
    done.stdout.decode("ascii")
    run = here / "Läufe" / "eins"
    assert "Läufe/eins" in (run / "recipe.toml").read_text(encoding="utf-8")
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["steps"] == 1


def test_a_search_starts_its_trainings_likewise() -> None:
    command = command_of(Path("recipe.toml"), 2)
    assert "-P" in command[: command.index("-m")]


TAKEN_AWAY = """
import os, select, socket, sys
# What asks for the system when it is loaded has to see the true one.
import multiprocessing, numpy, psutil, simplejpeg, torch, torch.distributed
import torch.distributed.elastic.agent.server.api

OF_LINUX = {
    os: "memfd_create MFD_CLOEXEC O_PATH posix_fadvise posix_fallocate sched_getaffinity",
    socket: "SO_PEERCRED TCP_INFO TCP_USER_TIMEOUT SOCK_CLOEXEC",
    select: "epoll",
}
for module, names in OF_LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.platform = "darwin"
with open(os.environ["TAKEN"], "a") as taken:
    print(os.getpid(), file=taken)
"""
"""As on macOS: on Linux, with those calls taken away."""

SHORT = "--train.steps=2 --train.global_batch_size=16 --train.micro_batch_size=4"


@pytest.mark.slow
def test_without_linuxs_calls_two_workers_end_in_the_bits_of_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TAKEN_AWAY)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    digests = set()
    for workers in (1, 2):
        run, taken = tmp_path / f"run-{workers}", tmp_path / f"taken-{workers}"
        words = ["train", "nin_small", "--data.name=generated", *SHORT.split()]
        words += [f"--nproc-per-node={workers}", f"--run.folder={run}"]
        environment = {**os.environ, "PYTHONPATH": path, "TAKEN": str(taken)}
        subprocess.run([sys.executable, "-m", "firecaffe", *words], env=environment, check=True)
        # The launcher and each rank: an error in sitecustomize is printed, and nothing ends.
        assert len(taken.read_text().split()) >= 1 + workers
        digests.add(json.loads((run / "result.json").read_text("utf-8"))["weights_sha256"])
    assert len(digests) == 1
