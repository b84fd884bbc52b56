"""A script's step with `firecaffe.parallelize` against the same step with DistributedDataParallel.

    python -m benchmarks.training.ddp_script_step > benchmarks/results/ddp_script_step.md

Both models live in the same processes, so both have the same malloc setting, and take turns in
blocks of some steps. Before it is timed each network's gradients are compared with DDP's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from firecaffe.models import build_model
from firecaffe.runs.environment import commit, cpu_name

MIN_BLOCK_S = 0.25
"""A block has so many steps that it takes DDP this long."""

COLUMNS = ("ranks", "network", "MB", "DDP, ms", "ours, ms", "ours / DDP", "ratios", "n")

HEAD = """# A script's step: `parallelize` against DDP

    python -m benchmarks.training.ddp_script_step{arguments}

{cpu}, {cores} cores, torch {torch}, commit {commit}; Gloo, one thread for each rank, all ranks on
one host, exchange {exchange}, no compressor. A step is forward, backward and SGD. Both run in the
same processes in blocks of at least {block_s} s, which take turns, forth and back; a time is a
step's in its block on the slowest rank (median over the blocks), the ratio the median over pairs of
blocks (ratios: the least and the largest). Gradients were those of DDP within 1e-6 of their norm.
"""


def linear_stack(width: int, layers: int) -> nn.Module:
    parts = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def lenet() -> nn.Module:
    return build_model("lenet", 10, 1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1 x 4096": (lambda: nn.Linear(4096, 4096), (16, 4096)),
    "16 x 1024": (lambda: linear_stack(1024, 16), (16, 1024)),
    "2 x 64": (lambda: linear_stack(64, 2), (16, 64)),
    "2 x 256": (lambda: linear_stack(256, 2), (16, 256)),
    "lenet": (lenet, (16, 1, 28, 28)),
}
"""A network, and the shape of a rank's batch."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--exchange", default="tree")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        run_rank(given)
        return
    arguments = "".join(f" {argument}" for argument in sys.argv[1:])
    facts = {"cpu": cpu_name(), "torch": torch.__version__, "commit": commit()[:12]}
    facts |= {"exchange": given.exchange, "block_s": str(MIN_BLOCK_S)}
    print(HEAD.format(arguments=arguments, cores=os.cpu_count(), **facts))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for ranks in given.ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.training.ddp_script_step"]
        command += ["--as-rank", *sys.argv[1:]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"| {' | '.join(json.loads(line))} |", flush=True)
        if process.returncode:
            raise SystemExit(process.returncode)


def run_rank(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in given.networks:
        row = compare(name, given.exchange, given.pairs)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def compare(name: str, exchange: str, pairs: int) -> list[str]:
    """A row of the table."""
    make, shape = NETWORKS[name]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch = torch.randn(shape, generator=generator)
    ways = {
        "ddp": Way(make, DistributedDataParallel, batch),
        "ours": Way(make, lambda m: firecaffe.parallelize(m, exchange=exchange), batch),
    }
    for _ in range(3):  # buckets are cut anew after the first step
        gradients = {way: ways[way].step() for way in ways}
        for ours, theirs in zip(gradients["ours"], gradients["ddp"], strict=True):
            if (ours - theirs).norm() > 1e-6 * theirs.norm():
                raise SystemExit(f"{name}: the gradients differ by {(ours - theirs).norm():g}")
    block = 4
    while (taken_s := ways["ddp"].time(block)) < MIN_BLOCK_S:
        block = max(block + 1, int(1.2 * block * MIN_BLOCK_S / max(taken_s, 1e-3)))
    ways["ours"].time(block)
    samples_s: dict[str, list[float]] = {way: [] for way in ways}
    for pair in range(pairs):
        for way in list(ways) if pair % 2 == 0 else reversed(ways):
            samples_s[way].append(ways[way].time(block) / block)
    ratios = [o / d for o, d in zip(samples_s["ours"], samples_s["ddp"], strict=True)]
    megabytes = sum(p.nbytes for p in ways["ddp"].model.parameters()) / 1e6
    return [
        str(dist.get_world_size()),
        name,
        f"{megabytes:.3g}",
        *(f"{statistics.median(samples_s[way]) * 1e3:.3g}" for way in ("ddp", "ours")),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        str(pairs),
    ]


class Way:
    """A network with its optimizer, wrapped one way or the other."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        wrap: Callable[[nn.Module], DistributedDataParallel],
        batch: Tensor,
    ) -> None:
        torch.manual_seed(0)
        self.model = wrap(make())
        self.batch = batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4)

    def step(self) -> list[Tensor]:
        """One step; the gradients that it has used."""
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(self.batch).square().mean())
        self.optimizer.step()
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def time(self, steps: int) -> float:
        """Seconds for so many steps on the slowest rank, the same on all ranks."""
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(steps):
            self.step()
        slowest = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)


if __name__ == "__main__":
    main()
