"""Uncompressed on slow links, whole processes in turns: DDP as torchrun starts it, and ours.

Started by `end_to_end apart`. Unlike in `end_to_end_speed`, where all variants share a
process, each has its own malloc here: ours keeps freed memory, DDP has glibc's default, as a user's
script has.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.kit import raw_lines
from benchmarks.training.end_to_end_recipe import (
    BASE_LR,
    DDP,
    HOSTS,
    RING,
    UNCOMPRESSED,
    open_images,
)
from benchmarks.training.end_to_end_speed import make_step, time_block
from firecaffe.cluster.world import World, join

VARIANTS = (DDP, RING, UNCOMPRESSED)


def rank_program(variant: str, data: Path, steps: int) -> None:
    """One rank of one process group; the first prints its block."""
    torch.set_num_threads(1)
    if variant != DDP:
        with join("cpu") as world:
            _time(world, variant, data, steps)
        return
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), group)
    _time(world, variant, data, steps)
    dist.destroy_process_group()


def _time(world: World, variant: str, data: Path, steps: int) -> None:
    step = make_step(world, variant, open_images(data)[0])
    rate = BASE_LR / 10
    time_block(world, variant, step, 0, steps, rate)  # warms up
    block = time_block(world, variant, step, steps, steps, rate)
    step.close()
    if world.is_first:
        print(json.dumps(asdict(block)), flush=True)


def run(data: Path, out: Path, rounds: int, steps: int, rate_bits_per_s: int) -> None:
    with VirtualCluster(HOSTS, rate_bits_per_s) as cluster:
        for number in range(rounds):
            turn = number % len(VARIANTS)
            for variant in (*VARIANTS[turn:], *VARIANTS[:turn]):
                command = [sys.executable, "-m", "benchmarks.training.end_to_end", "apart-one"]
                command += ["--data", str(data), "--variant", variant, "--steps", str(steps)]
                block = json.loads(cluster.run(command, timeout_s=300.0).splitlines()[-1])
                raw_lines.append(out, {"kind": "apart", **block, "round": number})
                print(f"{number} {variant}: {block['samples'] / block['block_s']:.1f} images/s")
