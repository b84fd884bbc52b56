"""Forecast against measured step time of a network that is split, or in stages, on emulated hosts.

    sudo -E python -m benchmarks.parallel.forecast_layouts --out LAYOUTS.jsonl --rates 100mbit 1gbit
    python -m benchmarks.parallel.forecast_layouts --out LAYOUTS.jsonl --page

AlexNet at its full width on made-up images of 227 x 227. For each rate and size of a micro-batch
`firecaffe check` on those hosts writes a cluster file. Then each layout is trained with that file
as `run.cluster`, so that its forecast is made before its first step and kept in its folder. What is
compared is the median step of the slowest rank, by `firecaffe explain`'s own reading of both. DDP
is forecast by the function of `firecaffe plan` for the exchange `native` in buckets of 25 MiB,
before it is run. Hosts have equal shares of this machine's processors, and none has what another
leaves.
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit import raw_lines
from benchmarks.kit.made_up_images import RECIPE
from benchmarks.parallel.trick_speed import ddp_step
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cluster.world import join
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.forecast import forecast
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.score import Score, score, score_parallel

MODULE = "benchmarks.parallel.forecast_layouts"
HOSTS, BATCH = 4, 64
KEPT = 0.1
"""Of the processors, for the kernel's work on packets."""

ALEXNET = {"model": "alexnet", "size": 227, "classes": 1000}
TRICK = """
[parallel]
model = 4
parts = 4
scheme = "one_weird_trick"
split = { "classifier.*" = "neurons", "classifier.3" = "inputs" }
"""
DDP, DDP_BUCKET_BYTES, DDP_STEPS = "DDP", 25 * 2**20, 3
LAYOUTS = {
    "data, ring": (16, '[exchange]\nalgorithm = "ring"\n'),
    "one weird trick": (16, TRICK),
    "2 x 2 stages": (4, '[parallel]\nstages = ["features.8"]\n'),
    "4 stages": (4, '[parallel]\nstages = ["features.4", "features.10", "classifier"]\n'),
    DDP: (16, ""),
}
"""Samples of a micro-batch, and what else the recipe says."""


def measure(layout: str, rate: str, rounds: int, steps: int, folder: Path, out: Path) -> None:
    """The check, if its file is not there yet, then the trainings; a row for each."""
    micro_batch, words = LAYOUTS[layout]
    plain = RECIPE.format(**ALEXNET, batch=BATCH, micro_batch=micro_batch, steps=steps + 1)
    file = folder / f"cluster-{rate}-{micro_batch}.toml"
    bare, recipe = folder / f"bare-{micro_batch}.toml", folder / f"{layout.replace(' ', '-')}.toml"
    bare.write_text(plain)
    recipe.write_text(plain + words)
    program = [sys.executable, "-m", "firecaffe"]
    processors = (1 - KEPT) * (os.cpu_count() or 1) / HOSTS
    for number in range(rounds):
        run = folder / f"{layout.replace(' ', '-')}-{rate}-{number}"
        with VirtualCluster(HOSTS, parse_rate(rate), processors=processors) as cluster:
            if not file.exists():
                looks = ["check", str(bare), "--write", str(file), "--folder", str(folder)]
                cluster.run([*program, *looks], timeout_s=1800.0)
                assert load_cluster(str(file)).device.measured
            if layout == DDP:
                found = forecast_ddp(bare, file)
                command = [sys.executable, "-m", MODULE, "--rank", "--out", str(run)]
                cluster.run(command, timeout_s=1800.0)
                found["measured_s"] = raw_lines.read(run, "ddp")[0]["step_s"]
            else:
                words_of_run = ["--run.folder", str(run), "--run.cluster", str(file)]
                cluster.run([*program, "train", str(recipe), *words_of_run], timeout_s=1800.0)
                found = read(run)
        row = {"kind": "run", "layout": layout, "rate": rate, "round": number, **found}
        raw_lines.append(out, row)
        print(row, file=sys.stderr, flush=True)


def forecast_ddp(recipe: Path, file: Path) -> dict[str, Any]:
    """DDP's step as `firecaffe plan` has it."""
    work = replace(workload_of(recipe_of(recipe)), bucket_bytes=DDP_BUCKET_BYTES)
    row = forecast(work, load_cluster(str(file)), HOSTS, "native")
    return {"forecast_s": row.step_s, "low_s": row.step_low_s, "high_s": row.step_high_s}


def read(run: Path) -> dict[str, Any]:
    """A run's forecast, and what it came to."""
    timings = read_timings(run)
    found = score_parallel(run, timings) or score(run, timings, explain(run))
    assert found is not None, "no forecast"
    step = found.step
    if isinstance(found, Score):
        parts = {each.name: (each.forecast_s, each.measured_s) for each in found.parts}
    else:
        parts = {each.name: (each.forecast, each.measured) for each in found.figures}
    return {
        "forecast_s": step.forecast_s,
        "low_s": step.low_s,
        "high_s": step.high_s,
        "measured_s": step.measured_s,
        "parts": parts,
    }


def run_ddp(out: Path) -> None:
    """This rank's part of DDP's steps; the first rank writes."""
    torch.set_num_threads(1)
    with join("cpu") as world:
        step = ddp_step(world.rank, BATCH)
        step()
        dist.barrier()
        times = []
        for _ in range(DDP_STEPS):
            begun = time.perf_counter()
            step()
            dist.barrier()
            times.append(time.perf_counter() - begun)
        if world.is_first:
            raw_lines.append(out, {"kind": "ddp", "step_s": median(times)})


def page(out: Path) -> str:
    """A row for each layout and rate."""
    lines = [
        "| link | layout | n | forecast, ms | band | measured, ms | runs | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = raw_lines.read(out, "run")
    for rate, layout in dict.fromkeys((row["rate"], row["layout"]) for row in rows):
        own = [row for row in rows if (row["rate"], row["layout"]) == (rate, layout)]
        own.sort(key=lambda row: row["measured_s"])
        middle, least, most = own[len(own) // 2], own[0], own[-1]
        said, found = middle["forecast_s"], middle["measured_s"]
        lines.append(
            f"| {rate} | {layout} | {len(own)} | {1e3 * said:,.0f} | "
            f"{1e3 * middle['low_s']:,.0f} to {1e3 * middle['high_s']:,.0f} | {1e3 * found:,.0f} | "
            f"{1e3 * least['measured_s']:,.0f} to {1e3 * most['measured_s']:,.0f} | "
            f"{said / found - 1:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="that are counted, of a training")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    if given.rank:
        run_ddp(given.out)
        return
    raw_lines.begin(given.out)
    with TemporaryDirectory(prefix="firecaffe-layouts-") as place:
        for rate in given.rates:
            for layout in given.layouts:
                measure(layout, rate, given.rounds, given.steps, Path(place), given.out.resolve())
    print(page(given.out))


if __name__ == "__main__":
    main()
