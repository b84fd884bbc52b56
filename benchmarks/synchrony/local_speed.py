"""Images/s of local training on slow links, against DDP and against no exchange at all.

    python -m benchmarks.synchrony.local_speed --data DATA.pt --out SPEED.jsonl    # needs root

DATA.pt is that of `benchmarks.training.end_to_end data`, and so are the network, the recipe and the
hosts: four emulated ones, with links of 100 Mbit/s. Every rank runs all variants in turn, and who
comes first changes from round to round. "no exchange" is local training whose first average comes
after what is timed. A local training is timed over whole rounds. Before, each variant is trained
for a few steps on the hosts and on one worker, and has to end in the same bits.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import firecaffe
from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit import raw_lines
from benchmarks.kit.from_first import from_first
from benchmarks.kit.step_starts import STARTS
from benchmarks.training.end_to_end_recipe import (
    ALONE,
    BASE_LR,
    DDP,
    GLOBAL_BATCH_SIZE,
    HOSTS,
    UNCOMPRESSED,
    make_network,
    make_recipe,
    open_images,
)
from benchmarks.training.end_to_end_speed import make_step
from firecaffe.cluster.world import join
from firecaffe.data import TensorDataset
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.synchrony.config import LOCAL, SynchronyConfig
from firecaffe.training.plugins import VARIABLE as PLUGINS

MODULE = "benchmarks.synchrony.local_speed"

STEPS, FIRST, LAST = 128, 32, 96
"""Of a training; the steps between which it is timed, whole rounds of 8 and of 32."""

PROCESSORS = 0.4
"""Of a core, for each host: it computes at one pace whatever the others do, and pays for its part
of an exchange."""

CHECKED_STEPS = 24
"""Of the trainings that are compared with one worker's."""

BLOCK = 20
"""Steps of DDP that are timed."""

NO_EXCHANGE = "no exchange"

Words = dict[str, Any]

LOCALS: dict[str, tuple[str, Words]] = {
    NO_EXCHANGE: (UNCOMPRESSED, {"local_steps": STEPS}),
    "H = 8": (UNCOMPRESSED, {"local_steps": 8}),
    "H = 8, float16, 4 beside": ("float16", {"local_steps": 8, "overlap_steps": 4}),
    "H = 8, int8, 3 beside": ("int8", {"local_steps": 8, "overlap_steps": 3}),
    "H = 8, float16, 2 fragments, 2 beside": (
        "float16",
        {"local_steps": 8, "fragments": 2, "overlap_steps": 2},
    ),
    "H = 8, int8, 2 fragments, 1 beside": (
        "int8",
        {"local_steps": 8, "fragments": 2, "overlap_steps": 1},
    ),
    "H = 32": (UNCOMPRESSED, {"local_steps": 32}),
    "H = 32, float16, 4 beside": ("float16", {"local_steps": 32, "overlap_steps": 4}),
}
"""Name to compressor and words of [synchrony]."""


def recipe_of(name: str, steps: int, folder: Path) -> Recipe:
    compressor, words = LOCALS[name]
    words = {**words, "local_steps": min(words["local_steps"], steps)}
    made = make_recipe(compressor, 1, steps, str(folder))
    synchrony = SynchronyConfig(mode=LOCAL, replicas=HOSTS, **words)
    return replace(made, synchrony=synchrony)


def train(name: str, steps: int, data: TensorDataset, folder: Path) -> firecaffe.Result:
    """Trains in the world that there is."""
    few = TensorDataset(data.inputs[:64], data.targets[:64], 10)
    recipe = recipe_of(name, steps, folder)
    return firecaffe.train(recipe, make_network, train_set=data, test_set=few)


def alone(names: Sequence[str], data: TensorDataset) -> dict[str, str]:
    """The digests that one worker ends in."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as parent:
        return {
            name: train(name, CHECKED_STEPS, data, Path(parent, str(i))).state_sha256
            for i, name in enumerate(names)
        }


def rank_program(names: Sequence[str], data: TensorDataset, rounds: int, out: Path) -> None:
    """names: of variants. Raises: SystemExit if hosts do not end in one worker's bits."""
    torch.set_num_threads(1)
    expected = {row["variant"]: row["state_sha256"] for row in raw_lines.read(out, "alone")}
    with join("cpu") as world, TemporaryDirectory() as place:
        folder = Path(from_first(place))
        for i, name in enumerate(expected):
            found = train(name, CHECKED_STEPS, data, folder / f"check-{i}").state_sha256
            if found != expected[name]:
                raise SystemExit(f"{name}: hosts end in other bits than one worker")
        ddp = {name: make_step(world, name, data) for name in (DDP, ALONE) if name in names}
        for number in range(rounds):
            turn = number % len(names)
            for i, name in enumerate([*names[turn:], *names[:turn]]):
                if name in ddp:
                    start = number * 2 * BLOCK
                    for step in range(start, start + BLOCK):
                        ddp[name](step, BASE_LR / 10)
                    dist.barrier()
                    begun = time.perf_counter()
                    for step in range(start + BLOCK, start + 2 * BLOCK):
                        ddp[name](step, BASE_LR / 10)
                    dist.barrier()
                    taken_s, steps = time.perf_counter() - begun, BLOCK
                else:
                    train(name, STEPS, data, folder / f"{number}-{i}")
                    taken_s, steps = STARTS[LAST] - STARTS[FIRST], LAST - FIRST
                rate = steps * GLOBAL_BATCH_SIZE / _longest(taken_s)
                if world.is_first:
                    row = {"kind": "run", "variant": name, "round": number, "images_per_s": rate}
                    raw_lines.append(out, row)


def _longest(taken_s: float) -> float:
    """Of all ranks."""
    found = torch.tensor(taken_s)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=5)
    every = [*LOCALS, DDP, ALONE]
    parser.add_argument("--variants", nargs="+", choices=every, default=every)
    parser.add_argument("--rate", type=parse_rate, default="100mbit")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    data = open_images(given.data)[0]
    if given.rank:
        rank_program(given.variants, data, given.rounds, given.out)
        return
    if given.out.exists():
        raise SystemExit(f"{given.out} exists; the rows of two runs are not to be mixed")
    command = [sys.executable, "-m", MODULE, "--rank", "--data", str(given.data)]
    command += ["--out", str(given.out.resolve()), "--rounds", str(given.rounds)]
    command += ["--variants", *given.variants]
    with VirtualCluster(HOSTS, given.rate, processors=PROCESSORS) as cluster:
        conditions = {**cluster.conditions(), "cpu": cpu_name(), "torch": torch.__version__}
        conditions |= {"commit": commit()[:12], "cores": os.cpu_count() or 1}
        raw_lines.append(given.out, {"kind": "conditions", **conditions})
        for name, digest in alone([n for n in given.variants if n in LOCALS], data).items():
            raw_lines.append(given.out, {"kind": "alone", "variant": name, "state_sha256": digest})
        cluster.run(command, timeout_s=3600.0, environment={PLUGINS: "benchmarks.kit.step_starts"})


if __name__ == "__main__":
    main()
