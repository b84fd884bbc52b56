"""Scripts whose ranks srun, mpirun or a shell has started: each says on its own stderr how it ends.

`init_process_group` puts a hook of torch's around ours there; torchrun's ranks leave a report.
"""

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.typed import Typed

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import firecaffe

case, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
train = {"global_batch_size": 12, "micro_batch_size": 4, "steps": 3}
solver, run, more = {}, {"tensorboard": False, "folder": folder}, {}
images = torch.arange(24 * 16).reshape(24, 1, 4, 4) % 251
data = firecaffe.TensorDataset(images.to(torch.uint8), torch.arange(24) % 2, num_classes=2)
test = data

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 2))

    def forward(self, images):
        if case == "killed" and rank == 1 and self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)

def loss(outputs, labels):
    raise ValueError("of mine")

if case == "own code":
    more["loss"] = loss
if case == "recipe":
    train["micro_batch_size"] = 12
if case == "data":
    test = None
if case == "checkpoint":
    more["resume"] = "nowhere"
if case == "run":
    os.makedirs(folder, exist_ok=True)
if case == "agreement":
    solver["base_lr"] = 0.01 * (1 + rank)
if case == "not finite":
    solver["base_lr"] = 1e38
if case == "joined before":
    torch.distributed.init_process_group("gloo")
    train["micro_batch_size"] = 12
recipe = firecaffe.Recipe(
    train=firecaffe.TrainConfig(**train),
    solver=firecaffe.SolverConfig(**solver),
    run=firecaffe.RunConfig(**run),
    exchange=firecaffe.ExchangeConfig(silent_s=5),
)
firecaffe.train(recipe, Net, data, test, **more)
"""

CASES: dict[str, tuple[int, str]] = {
    "recipe": (2, "micro-batch"),
    "joined before": (2, "micro-batch"),
    "own code": (2, "of mine"),
    "data": (3, "train_set and test_set come together"),
    "checkpoint": (4, "nowhere"),
    "agreement": (5, "rank 1 differs"),
    "run": (8, "exists already"),
    "not finite": (18, "not finite"),
}
"""By what goes wrong: the exit code of both ranks, and what each says."""


def started(script: Path, *words: object) -> list[tuple[int, str]]:
    """The exit code and the stderr of two ranks, which are told what srun or a shell tells."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as ends:
        ranks = [
            ends.enter_context(Typed(script, *words, environment={**world, "RANK": str(rank)}))
            for rank in range(2)
        ]
        return [(each.wait(), each.communicate()[1]) for each in ranks]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


def lines_of(said: str, rank: int) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(f"firecaffe: rank {rank}: ")]


@pytest.mark.parametrize("case", CASES)
def test_each_rank_says_in_one_line_what_ends_it(case: str, script: Path, tmp_path: Path) -> None:
    code, words = CASES[case]
    for rank, (found, said) in enumerate(started(script, case, tmp_path / "run")):
        assert found == code, said
        (line,) = lines_of(said, rank)
        assert words in line
        assert said.count("Traceback") == (case == "own code"), said


def test_a_rank_that_is_killed_is_told_of_by_the_other(script: Path, tmp_path: Path) -> None:
    (code, said), (killed, _) = started(script, "killed", tmp_path / "run")
    assert killed == -signal.SIGKILL
    assert code == 9, said
    (line,) = lines_of(said, 0)
    assert f"rank 1 on {os.uname().nodename} went away" in line
    assert "resume" not in line, "there is no checkpoint yet"
