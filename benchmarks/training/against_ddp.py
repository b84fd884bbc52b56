"""Two workers of firecaffe against DistributedDataParallel as torchrun starts it.

    python -m benchmarks.training.against_ddp

Whole processes alternate, ours and a plain DDP script over Gloo, each under torchrun with one
thread for each rank, so that each has its own malloc: ours keeps freed memory, the script has
glibc's default, as a user's has. Same network, samples, global batch and optimizer. Both must
start with a gradient of the same norm (without dropout; not where there is BatchNorm, whose batches
differ). `against_loop` compares the two in one process, where DDP has our malloc setting
too.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.kit.our_step import OurStep
from benchmarks.training.against_loop import (
    NUM_SAMPLES,
    DdpLoop,
    first_gradient,
    has_batch_norm,
    make_dataset,
    make_network,
    make_ours,
)
from firecaffe.cluster.world import World, join
from firecaffe.data import Batches, DataConfig, SampleOrder
from firecaffe.recipe.sections import TrainConfig
from firecaffe.runs.environment import cpu_name

NUM_MICRO_BATCHES = 8
WORKERS = 2
CASES = (
    ("nin_small", 8),
    ("nin_cifar", 8),
    ("nin_cifar", 16),
    ("googlenet_small_bn", 8),
    ("googlenet_small_bn", 16),
)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--exchange", default="tree")
    parser.add_argument("--case", nargs=3, metavar=("ROLE", "NETWORK", "MICRO"))
    arguments = parser.parse_args()
    if arguments.case:
        role, network, micro_batch_size = arguments.case
        one_case(role, network, int(micro_batch_size), arguments)
        return
    print(f"{cpu_name()}, torch {torch.__version__}, {WORKERS} workers, {arguments.exchange}\n")
    print(
        "| network | micro-batch | global batch | images/s | DDP's | ratio, median | ratios | n |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for network, micro_batch_size in CASES:
        print(_row(network, micro_batch_size, arguments), flush=True)


def _row(network: str, micro_batch_size: int, arguments: argparse.Namespace) -> str:
    ours, ddps = [], []
    for _ in range(arguments.pairs):
        our, ddp = (_start(role, network, micro_batch_size, arguments) for role in ("ours", "ddp"))
        if (
            not has_batch_norm(make_network(network))
            and abs(our["gradient"] / ddp["gradient"] - 1) > 1e-3
        ):
            raise SystemExit(f"{network}: gradients differ: {our['gradient']}, {ddp['gradient']}")
        ours.append(our["images_per_s"])
        ddps.append(ddp["images_per_s"])
    ratios = [our / ddp for our, ddp in zip(ours, ddps, strict=True)]
    return (
        f"| {network} | {micro_batch_size} | {micro_batch_size * NUM_MICRO_BATCHES} "
        f"| {statistics.median(ours):,.0f} | {statistics.median(ddps):,.0f} "
        f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} "
        f"| {len(ratios)} |"
    )


def _start(
    role: str, network: str, micro_batch_size: int, arguments: argparse.Namespace
) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(WORKERS), "-m", "benchmarks.training.against_ddp"]
    command += ["--seconds", str(arguments.seconds), "--exchange", arguments.exchange]
    command += ["--case", role, network, str(micro_batch_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def one_case(role: str, network: str, micro_batch_size: int, arguments: argparse.Namespace) -> None:
    """One side of a pair, on this rank."""
    torch.set_num_threads(1)
    config = TrainConfig(
        global_batch_size=micro_batch_size * NUM_MICRO_BATCHES, micro_batch_size=micro_batch_size
    )
    dataset, model = make_dataset(network), make_network(network)
    order = SampleOrder(0, NUM_SAMPLES, config.global_batch_size, micro_batch_size)
    if role == "ours":
        with join("cpu") as world:
            batches = Batches(dataset, order, DataConfig())
            ours = make_ours(world, model, batches, config, arguments.exchange)
            _time(ours, config, world, arguments)
            ours.close()
        return
    dist.init_process_group("gloo")
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)
    _time(DdpLoop(model, dataset, order, world), config, world, arguments)
    dist.destroy_process_group()


def _time(
    run: OurStep | DdpLoop, config: TrainConfig, world: World, arguments: argparse.Namespace
) -> None:
    gradient = float(first_gradient(run).norm())
    run(1)
    start = time.perf_counter()
    run(2)
    steps = torch.tensor(max(3, round(arguments.seconds / (time.perf_counter() - start))))
    dist.broadcast(steps, 0)
    dist.barrier()
    start = time.perf_counter()
    for step in range(int(steps)):
        run(step % 4)
    dist.barrier()
    seconds = time.perf_counter() - start
    if world.is_first:
        images_per_s = int(steps) * config.global_batch_size / seconds
        print(json.dumps({"images_per_s": images_per_s, "gradient": gradient}))


if __name__ == "__main__":
    main()
