"""Accuracy of every codec after the same samples, and whether four hosts train to the same bits.

Every training is `firecaffe.train` in processes of its own, on two local workers under torchrun or
on the hosts of an emulated cluster, and leaves its result.json.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import firecaffe
from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.kit import raw_lines
from benchmarks.training.end_to_end_recipe import (
    GLOBAL_BATCH_SIZE,
    HOSTS,
    OURS,
    make_network,
    make_recipe,
    open_images,
)

WORKERS = 2
NUM_TEST = 10_000
FORWARD_SHARE = 1 / 3
"""Of a training step's time, about."""

PROBE_STEPS = 12

KEPT = ("steps", "images_per_s", "loss", "top1", "weights_sha256")


@dataclass(frozen=True)
class One:
    """One training."""

    variant: str
    seed: int
    steps: int
    num_test: int = NUM_TEST

    def command(self, data: Path, folder: Path) -> list[str]:
        """Runs it as one rank of the environment's world."""
        words = ["-m", "benchmarks.training.end_to_end", "train-one", "--data", str(data)]
        words += ["--variant", self.variant, "--seed", str(self.seed), "--steps", str(self.steps)]
        return [*words, "--num-test", str(self.num_test), "--folder", str(folder)]


def train_one(one: One, data: Path, folder: Path) -> None:
    """In this process, as the rank that the environment says."""
    train_set, test_set = open_images(data, one.num_test)
    recipe = make_recipe(one.variant, one.seed, one.steps, str(folder))
    firecaffe.train(recipe, make_network, train_set=train_set, test_set=test_set)


def train_on_workers(one: One, data: Path) -> dict[str, Any]:
    """On WORKERS local ranks. Raises: SystemExit with what they said, where they fail."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, "--nproc-per-node", str(WORKERS), *one.command(data, folder)]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{one}: exit code {done.returncode}\n{done.stderr[-4000:]}")
        return {**_result(folder), "wall_s": time.perf_counter() - start}


def train_on_hosts(one: One, data: Path, cluster: VirtualCluster) -> dict[str, Any]:
    """On one rank of each host."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "run")
        cluster.run([sys.executable, *one.command(data, folder)], timeout_s=600.0)
        return _result(folder)


def _result(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {word: result[word] for word in KEPT}


def same_bits(data: Path, out: Path, steps: int, rate_bits_per_s: int) -> None:
    """Trains a few steps of every variant on hosts and on workers, and compares the weights."""
    with VirtualCluster(HOSTS, rate_bits_per_s) as cluster:
        for variant in OURS:
            one = One(variant, 1, steps, num_test=250)
            on_hosts = train_on_hosts(one, data, cluster)["weights_sha256"]
            on_workers = train_on_workers(one, data)["weights_sha256"]
            row = {"kind": "same_bits", "variant": variant, "steps": steps}
            raw_lines.append(out, {**row, "hosts": on_hosts, "workers": on_workers})
            if on_hosts != on_workers:
                raise SystemExit(f"{variant}: hosts and local workers differ after {steps} steps")
            print(f"{variant}: the same after {steps} steps, {on_hosts[:12]}", flush=True)


def train_all(
    data: Path, out: Path, variants: Sequence[str], seeds: int, minutes: float, steps: int
) -> None:
    """Trains variants with every seed. What `out` has already is not trained again.

    steps: of each training; 0: as many as `minutes` have room for, by a probe of each variant. Once
    they are planned, `out` has them, and they stay.
    """
    planned = raw_lines.read(out, "plan")
    if not planned:
        planned = [plan(data, variants, seeds, minutes, steps)]
        raw_lines.append(out, planned[0])
    steps = planned[0]["steps"]
    finished = {(row["variant"], row["seed"]) for row in raw_lines.read(out, "accuracy")}
    for seed, variant in itertools.product(range(1, seeds + 1), variants):
        if (variant, seed) in finished:
            continue
        result = train_on_workers(One(variant, seed, steps), data)
        raw_lines.append(out, {"kind": "accuracy", "variant": variant, "seed": seed, **result})
        print(
            f"seed {seed} {variant:10} top-1 {result['top1']:.2%}  loss {result['loss']:.3f}  "
            f"{result['images_per_s']:.0f} images/s  {result['wall_s']:.0f} s",
            flush=True,
        )


def plan(
    data: Path, variants: Sequence[str], seeds: int, minutes: float, steps: int
) -> dict[str, Any]:
    """How many steps every training takes; tells the estimate first."""
    steps_s, starts_s = 0.0, 0.0
    for variant in variants:
        probe = train_on_workers(One(variant, 1, PROBE_STEPS, num_test=250), data)
        step_s = GLOBAL_BATCH_SIZE / probe["images_per_s"]
        steps_s += step_s
        starts_s += probe["wall_s"] - PROBE_STEPS * step_s
        starts_s += NUM_TEST / GLOBAL_BATCH_SIZE * step_s * FORWARD_SHARE
    if not steps:
        steps = max(100, int((minutes * 60 / seeds - starts_s) / steps_s) // 100 * 100)
    minutes = seeds * (starts_s + steps * steps_s) / 60
    print(
        f"{seeds} seeds of {len(variants)} variants, {steps} steps of {GLOBAL_BATCH_SIZE} images: "
        f"about {minutes:.0f} minutes",
        flush=True,
    )
    return {"kind": "plan", "steps": steps}
