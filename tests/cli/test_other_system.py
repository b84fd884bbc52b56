"""A training without what Linux alone has, as on macOS: on Linux, with those calls taken away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
