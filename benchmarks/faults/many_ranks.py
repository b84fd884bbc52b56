"""Many ranks on one machine: their start, steps, and what each comes to know of a kill.

    python -m benchmarks.faults.many_ranks > benchmarks/results/many_ranks.md

Real ranks, as forks of a process that has loaded torch (`tests.world`), train a small network by
`firecaffe.train`. The weights of all have to be the same bits. Then the same with a kill in the
middle. And the watch alone for more ranks than the machine holds: `benchmarks.faults.many_watches`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import firecaffe
from benchmarks.faults.many_watches import Watched, summary
from firecaffe import ExchangeConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.data import TensorDataset
from firecaffe.errors import PeerLostError
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.schema import read_rows
from tests.world import Ranks

STEPS = 20
MIDDLE = 15
"""Calls of the loss; some are made before the first step, one in each."""

SHARED, MESSAGES, WATCH = PARTS = "shared_memory", "messages", "watch"

COLUMNS = (
    *("ranks", "exchange", "start, s", "step, ms", "sockets, median", "most"),
    *("all know of the kill of", "after, s, median", "most", "they say"),
)

HEAD = """# Many ranks

    python -m benchmarks.faults.many_ranks

{cpu}, {cores} cores, torch {torch}, commit {commit}. Times are of this machine, whose cores all
ranks share: they show that it goes, not how fast it would go on a machine for each.

## Training

A network of {parameters} parameters, {steps} steps, one micro-batch for each rank; three trainings:
undisturbed, and with a kill in the middle of a rank that others hang on in the watch's tree, and of
one that none do. Start: from the first process's to the first step's, beside importing torch (forks
of a process that has it loaded). Step: the median over steps, the slowest rank's. Sockets: of a
rank's process, all of them. Known: from the kill until a rank has raised the error that names it;
in `they say` all that they say. The weights of all ranks were the same bits.
"""

WATCHES = """
## The watch alone

Processes without torch, each with its links and the process that beats beside it, {on_host} to a
host by name; {seconds:g} s, one a second each, then a kill.

| of {ranks} ranks | median | most |
|---|---|---|
| sockets | {sockets[0]:g} | {sockets[1]:g} |
| share of a core | {own[0]:.3%} | {own[1]:.3%} |
| the process beside it | {beside[0]:.3%} | {beside[1]:.3%} |

| killed | all others know after, s, median | most | they say |
|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--watches", type=int, default=512)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="of the page")
    given = parser.parse_args()
    if SHARED in given.parts:
        print_head()
    for way in (SHARED, MESSAGES):
        if way in given.parts:
            _run_ranks(1, os.getpid)  # loads torch
            for line in rows(given.ranks, way == SHARED):
                print(f"| {' | '.join(line)} |", flush=True)
    if WATCH in given.parts:
        print_watch(given.watches)


def print_head() -> None:
    facts = {"cpu": cpu_name(), "torch": torch.__version__, "commit": commit()[:12]}
    parameters = sum(each.numel() for each in Network().parameters())
    print(HEAD.format(cores=os.cpu_count(), parameters=parameters, steps=STEPS, **facts))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)


def print_watch(ranks: int) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults.many_watches", "--ranks", str(ranks)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    watched = Watched(**json.loads(told))
    print(
        WATCHES.format(
            on_host=watched.on_host,
            seconds=watched.measured_s,
            ranks=watched.ranks,
            sockets=watched.sockets,
            own=watched.of_a_core,
            beside=watched.of_a_core_beside,
        ),
        end="",
    )
    for name, (median, most) in watched.known_s.items():
        print(f"| {name} | {median:.2f} | {most:.2f} | {'; '.join(watched.names[name])} |")


class Network(nn.Module):
    """Two layers: the exchange and the start are what is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Loss:
    """The loss, which counts sockets in the middle of the training, and dies there if it has to."""

    def __init__(self, dies: bool, folder: Path) -> None:
        self.dies, self.folder = dies, folder
        self.called_s: list[float] = []
        self.sockets = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.called_s.append(time.time())
            if len(self.called_s) == MIDDLE:
                self.sockets = len(psutil.Process().net_connections("tcp"))
                if self.dies:
                    (self.folder / "killed").write_text(repr(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, labels)


def train(folder: str, shared_memory: bool, victim: int | None) -> dict[str, Any]:
    """On each rank. What it has seen of its training, or of the kill."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    recipe = Recipe(
        train=TrainConfig(global_batch_size=4 * world_size, micro_batch_size=4, steps=STEPS),
        solver=SolverConfig(base_lr=0.01),
        exchange=ExchangeConfig(algorithm="tree", shared_memory=shared_memory),
        run=RunConfig(folder=f"{folder}/run", tensorboard=False),
    )
    loss = Loss(rank == victim, Path(folder))
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            data = images(20 * world_size), images(100)  # no rank without samples in a step
            result = firecaffe.train(recipe, Network, *data, loss=loss)
    except PeerLostError as error:
        told = f"rank {error.rank}: {error.kind}"
        return {"known_s": time.time(), "told": told}
    return {
        "first_step_s": loss.called_s[-STEPS],
        "weights": result.weights_sha256,
        "sockets": loss.sockets,
    }


def images(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(0, 4, (number,), generator=generator)
    noise = torch.randint(-128, 129, (number, 1, 8, 8), generator=generator) / 64
    return TensorDataset(noise + labels[:, None, None, None], labels, 4)


def rows(world_size: int, shared_memory: bool) -> list[list[str]]:
    """A line for each kill. Raises: AssertionError if ranks end with other weights."""
    way = "shared memory" if shared_memory else "messages"
    with tempfile.TemporaryDirectory() as folder:
        begun_s = time.time()
        told = _run_ranks(world_size, train, folder, shared_memory, None)
        assert len({each["weights"] for each in told}) == 1, "ranks ended with other weights"
        start_s = max(each["first_step_s"] for each in told) - begun_s
        step_s = _slowest_step_s(Path(folder, "run"), world_size)
        sockets = summary([each["sockets"] for each in told])
    found = [
        f"{world_size}",
        way,
        f"{start_s:.1f}",
        f"{1e3 * step_s:.0f}",
        *map("{:g}".format, sockets),
    ]
    lines = []
    kills = (
        {"an inner rank": 1} if shared_memory else {"an inner rank": 1, "a leaf": world_size - 1}
    )
    for name, victim in kills.items():
        with tempfile.TemporaryDirectory() as folder:
            call = train, folder, shared_memory, victim
            told = _run_ranks(world_size, *call, lost=(victim,))
            del told[victim]
            killed_s = float(Path(folder, "killed").read_text())
            known_s = summary([each["known_s"] - killed_s for each in told])
            said = "; ".join(sorted({each["told"] for each in told}))
        lines.append([*found, f"{name}, {victim}", *map("{:.2f}".format, known_s), said])
        found = [""] * len(found)
    return lines


def _run_ranks(world_size: int, *call: Any, lost: tuple[int, ...] = ()) -> list[Any]:
    ranks = Ranks()
    try:
        return ranks.run(world_size, *call, lost=lost)
    finally:
        ranks.close()


def _slowest_step_s(run: Path, world_size: int) -> float:
    medians = []
    for rank in range(world_size):
        steps = list(read_rows(run / f"timings/rank-{rank}.jsonl", dict))
        medians.append(statistics.median(float(each["step_s"]) for each in steps[1:]))
    return max(medians)


if __name__ == "__main__":
    main()
