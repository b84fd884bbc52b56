"""AlexNet on slow links: images/s by one weird trick against DDP, at the same global batch.

    python -m benchmarks.parallel.trick_speed --out TRICK.jsonl --rates 100mbit 1gbit  # needs root
    python -m benchmarks.parallel.trick_speed --out TRICK.jsonl --page

Four emulated hosts, AlexNet at its full width on made-up images of 227 x 227. Every rank runs the
variants in turn. First one weird trick is trained for a few steps on the hosts and on one worker,
and has to end in the same bits.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import firecaffe
from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit import raw_lines
from benchmarks.kit.from_first import from_first
from benchmarks.kit.made_up_images import images
from benchmarks.kit.step_starts import STARTS
from firecaffe import DataConfig, ParallelConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.cluster.world import join
from firecaffe.models.known_networks import build_model
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.training.plugins import VARIABLE as PLUGINS

MODULE = "benchmarks.parallel.trick_speed"
HOSTS, CLASSES = 4, 1000
TRICK, DDP = "one weird trick", "DDP"
SPLIT = {"classifier.*": "neurons", "classifier.3": "inputs"}
CHECKED_STEPS, STEPS, DDP_STEPS = 2, 6, 2
"""Of the trainings that are compared; of those that are timed, without their first."""


def make() -> nn.Module:
    return build_model("alexnet", num_classes=CLASSES)


def train(model: int, batch: int, steps: int, folder: Path) -> firecaffe.Result:
    """Trains in the world that there is. model: the workers that hold one together."""
    scheme = ParallelConfig(1, model, SPLIT, HOSTS, "one_weird_trick")
    recipe = Recipe(
        data=DataConfig(augment="none", mean=[0.5], std=[0.25]),
        train=TrainConfig(batch, batch // HOSTS, steps=steps, device="cpu", eval_batch_size=4),
        solver=SolverConfig(base_lr=0.001, momentum=0.9),
        parallel=scheme,
        run=RunConfig(folder=str(folder), tensorboard=False),
    )
    return firecaffe.train(recipe, make, *images(batch))


def ddp_step(rank: int, batch: int) -> Callable[[], None]:
    network = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
    share = batch // HOSTS
    pixels, labels = images(batch)[0].batch(torch.arange(rank * share, (rank + 1) * share))
    assert isinstance(pixels, Tensor)
    own = (pixels.float() / 255 - 0.5) / 0.25

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(own), labels)
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def rank_program(rounds: int, rate: str, batch: int, out: Path) -> None:
    """Raises: SystemExit if hosts do not end in one worker's bits."""
    torch.set_num_threads(1)
    [expected] = raw_lines.read(out, "alone")
    with join("cpu") as world, TemporaryDirectory() as place:
        folder = Path(from_first(place))
        found = train(HOSTS, batch, CHECKED_STEPS, folder / "check").state_sha256
        if found != expected["state_sha256"]:
            raise SystemExit("hosts end in other bits than one worker")
        step = ddp_step(world.rank, batch)
        for number in range(rounds):
            for name in (TRICK, DDP) if number % 2 else (DDP, TRICK):
                if name == TRICK:
                    train(HOSTS, batch, STEPS, folder / str(number))
                    taken_s, steps = STARTS[-1] - STARTS[1], STEPS - 2
                else:
                    step()
                    dist.barrier()
                    begun, steps = time.perf_counter(), DDP_STEPS
                    for _ in range(steps):
                        step()
                    dist.barrier()
                    taken_s = time.perf_counter() - begun
                longest = torch.tensor(taken_s)
                dist.all_reduce(longest, dist.ReduceOp.MAX)
                if world.is_first:
                    rate_s = steps * batch / float(longest)
                    row = {"kind": "run", "rate": rate, "variant": name, "round": number}
                    raw_lines.append(out, {**row, "images_per_s": rate_s})


def page(out: Path) -> str:
    """A row for each rate and variant."""
    lines = [
        "| link | | n | images/s, median | least to most | to DDP |",
        "|---|---|---|---|---|---|",
    ]
    rows = raw_lines.read(out, "run")
    for rate in dict.fromkeys(row["rate"] for row in rows):
        by_name = {
            name: [
                row["images_per_s"] for row in rows if (row["rate"], row["variant"]) == (rate, name)
            ]
            for name in (TRICK, DDP)
        }
        base = median(by_name[DDP])
        lines += [
            f"| {rate} | {name} | {len(found)} | {median(found):.2f} | "
            f"{min(found):.2f} to {max(found):.2f} | {median(found) / base:.2f} |"
            for name, found in by_name.items()
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of all hosts")
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    if given.rank:
        rank_program(given.rounds, given.rates[0], given.batch, given.out)
        return
    if given.out.exists():
        raise SystemExit(f"{given.out} exists; the rows of two runs are not to be mixed")
    conditions = {"cpu": cpu_name(), "cores": os.cpu_count() or 1, "batch": given.batch}
    conditions |= {"torch": torch.__version__, "commit": commit()[:12]}
    raw_lines.append(given.out, {"kind": "conditions", **conditions})
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        digest = train(1, given.batch, CHECKED_STEPS, Path(folder, "alone")).state_sha256
    raw_lines.append(given.out, {"kind": "alone", "state_sha256": digest})
    for rate in given.rates:
        command = [sys.executable, "-m", MODULE, "--rank", "--out", str(given.out.resolve())]
        command += ["--rounds", str(given.rounds), "--rates", rate]
        command += ["--batch", str(given.batch)]
        with VirtualCluster(HOSTS, parse_rate(rate)) as cluster:
            cluster.run(
                command, timeout_s=3600.0, environment={PLUGINS: "benchmarks.kit.step_starts"}
            )


if __name__ == "__main__":
    main()
