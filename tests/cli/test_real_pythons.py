"""Pythons that start here as they do for users, which takes the time that loading torch takes.

Files of the current folder are not imported for a library, a network of one's own there is; names
and files are UTF-8 whatever the locale; and a training needs none of the calls that are Linux's.
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
"""A terminal whose locale knows ASCII alone. Python chooses the encoding when it starts."""

# Such a Python cannot start in a folder that is not ASCII.
ENVIRONMENT = {**os.environ, **(ASCII_ALONE if sys.prefix.isascii() else {})}


def test_a_training_in_a_folder_with_odd_names(tmp_path: Path) -> None:
    """`python -m firecaffe` puts the folder first; the launcher's ranks are started so, too."""
    here = tmp_path / "Größe"
    here.mkdir()
    for name in ("random", "torch", "json", "numpy"):
        code = f"open('ran-{name}', 'w')\nraise SystemExit('{name}.py of this folder')\n"
        (here / f"{name}.py").write_text(code)
    (here / "networks_of_mine.py").write_text(NETWORK)
    (here / "für.toml").write_text(RECIPE, encoding="utf-8")
    command = [sys.executable, "-m", "firecaffe", "train", "für.toml", "--nproc-per-node", "2"]
    done = subprocess.run(command, cwd=here, env=ENVIRONMENT, capture_output=True, check=False)
    assert not [path.name for path in here.glob("ran-*")]
    assert done.returncode == 0, done.stderr.decode()
    done.stdout.decode("ascii" if sys.prefix.isascii() else "utf-8")
    run = here / "Läufe" / "eins"
    assert "Läufe/eins" in (run / "recipe.toml").read_text(encoding="utf-8")
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["steps"] == 1


def test_a_search_starts_its_trainings_likewise() -> None:
    assert (
        "-P" in command_of(Path("recipe.toml"), 2)[: command_of(Path("recipe.toml"), 2).index("-m")]
    )


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

SHORT = "--train.steps=2 --train.global_batch_size=16 --train.micro_batch_size=4"


@pytest.mark.slow
def test_two_workers_end_in_the_bits_of_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TAKEN_AWAY)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    digests = set()
    for workers in (1, 2):
        run = tmp_path / f"run-{workers}"
        words = ["train", "nin_small", "--data.name=generated", *SHORT.split()]
        words += [f"--nproc-per-node={workers}", f"--run.folder={run}"]
        command = [sys.executable, "-m", "firecaffe", *words]
        taken = tmp_path / f"taken-{workers}"
        environment = {**os.environ, "PYTHONPATH": path, "TAKEN": str(taken)}
        subprocess.run(command, env=environment, check=True)
        # The launcher and each rank: an error in sitecustomize is printed, and nothing ends.
        assert len(taken.read_text().split()) >= 1 + workers
        result = json.loads((run / "result.json").read_text("utf-8"))
        digests.add(result["weights_sha256"])
    assert len(digests) == 1
