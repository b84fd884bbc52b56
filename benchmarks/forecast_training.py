"""Forecast against measured step time of real trainings on emulated clusters.

    sudo -E python -m benchmarks.forecast_training --page benchmarks/results/forecast.md

For each number of hosts: `firecaffe check` on that cluster writes its file; then each training runs
with that file as `run.cluster`, so that its forecast is made before its first step and kept in its
folder. What is compared is the median step, by `firecaffe explain`'s own reading of both. Hosts
have equal shares of this machine's processors, and none has what another leaves.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import torch

from benchmarks.virtual_cluster import VirtualCluster
from firecaffe.planner.cluster import load_cluster
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.run_folder import FORECAST
from firecaffe.runs.score import score

RECIPE = """
[model]
name = "{model}"
[data]
name = "generated"
[train]
global_batch_size = 64
micro_batch_size = 8
steps = {steps}
eval_batch_size = 500
[run]
tensorboard = false
"""
MODELS = ("nin_cifar", "lenet")
STEPS = {"nin_cifar": 16, "lenet": 40}
EXCHANGES = ("tree", "ring", "halving_doubling")
RATE = 200_000_000
KEPT = 0.1
"""Of the processors, for the kernel's work on packets."""
RUNS = 3
"""Of each training, in turns."""

COMMAND = "sudo -E python -m benchmarks.forecast_training --page benchmarks/results/forecast.md"

HEAD = """# Forecast against measured step time

    {command}

Real trainings on emulated clusters at {rate:g} Mbit/s, one rank a host, batch 64 in micro-batches
of 8: {cpu}, {cores} cores that host all ranks, torch {torch}, commit {commit}. Hosts have equal
shares of {used:.0%} of the cores (control groups), and none has what another leaves. Each cluster
was looked over by `firecaffe check` first, for each network; the training was then forecast from
that file before its first step. Times are of one step, in ms: each rank's median over its steps
(the first left out), of which the slowest rank's is taken; shown is the median of {runs} runs of n
steps, and from the least to the most.

| network | hosts | exchange | n | forecast | band | measured | runs | error | compute | exchange |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Row:
    """One training."""

    model: str
    hosts: int
    exchange: str
    steps: int
    forecast_s: float
    low_s: float
    high_s: float
    measured_s: float
    """The median run's; `runs_s`: each run's."""
    runs_s: tuple[float, ...]
    compute: tuple[float, float]
    """Forecast and measured."""
    exposed: tuple[float, float]

    @property
    def error(self) -> float:
        return self.forecast_s / self.measured_s - 1


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--page", type=Path, default=None)
    given = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for hosts in given.hosts:
            for model in given.models:
                rows += measure(Path(folder) / f"{model}-{hosts}", model, hosts)
    text = page(rows)
    print(text)
    if given.page is not None:
        given.page.write_text(text, encoding="utf-8")
        data = json.dumps([asdict(row) for row in rows], indent=1)
        given.page.with_suffix(".json").write_text(data + "\n", encoding="utf-8")


def measure(folder: Path, model: str, hosts: int) -> list[Row]:
    """The check, then RUNS trainings for each exchange."""
    folder.mkdir()
    recipe, file = folder / "recipe.toml", folder / "cluster.toml"
    recipe.write_text(RECIPE.format(model=model, steps=STEPS[model]))
    program = [sys.executable, "-m", "firecaffe"]
    found: dict[str, list[Row]] = {exchange: [] for exchange in EXCHANGES}
    processors = (1 - KEPT) * (os.cpu_count() or 1) / hosts
    with VirtualCluster(hosts, RATE, processors=processors) as cluster:
        looks = [*program, "check", str(recipe), "--write", str(file), "--folder", str(folder)]
        cluster.run(looks, timeout_s=300.0)
        assert load_cluster(str(file)).device.measured
        for number, exchange in product(range(RUNS), EXCHANGES):
            run = folder / f"{exchange}-{number}"
            words = ["--run.folder", str(run), "--run.cluster", str(file)]
            words += ["--exchange.algorithm", exchange]
            cluster.run([*program, "train", str(recipe), *words], timeout_s=300.0)
            row = read(run, model, hosts, exchange)
            found[exchange].append(row)
            print(row, f"{row.error:+.1%}", file=sys.stderr, flush=True)
    return [middle(runs) for runs in found.values()]


def middle(runs: Sequence[Row]) -> Row:
    """The run whose step is the median, with the steps of all."""
    in_order = sorted(runs, key=lambda row: row.measured_s)
    runs_s = tuple(row.measured_s for row in runs)
    return replace(in_order[len(runs) // 2], runs_s=runs_s)


def read(run: Path, model: str, hosts: int, exchange: str) -> Row:
    found = score(run, read_timings(run), explain(run))
    assert found is not None, f"no {FORECAST}"
    parts = {part.name: (part.forecast_s, part.measured_s) for part in found.parts}
    step = found.step
    measured = STEPS[model] - 1
    return Row(
        model,
        hosts,
        exchange,
        measured,
        step.forecast_s,
        step.low_s,
        step.high_s,
        step.measured_s,
        (step.measured_s,),
        parts["compute_s"],
        parts["exchange_s"],
    )


def page(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        band = f"{row.low_s * 1e3:.0f} to {row.high_s * 1e3:.0f}"
        spread = f"{min(row.runs_s) * 1e3:.0f} to {max(row.runs_s) * 1e3:.0f}"
        parts = [f"{a * 1e3:.0f} / {b * 1e3:.0f}" for a, b in (row.compute, row.exposed)]
        lines.append(
            f"| {row.model} | {row.hosts} | {row.exchange} | {row.steps} | "
            f"{row.forecast_s * 1e3:.0f} | {band} | {row.measured_s * 1e3:.0f} | "
            f"{spread} | {row.error:+.1%} | {' | '.join(parts)} |"
        )
    errors = [abs(row.error) for row in rows]
    within = sum(error <= 0.1 for error in errors)
    inside = sum(row.low_s <= row.measured_s <= row.high_s for row in rows)
    head = HEAD.format(
        command=COMMAND,
        rate=RATE / 1e6,
        cpu=cpu_name(),
        cores=os.cpu_count(),
        used=1 - KEPT,
        runs=RUNS,
        torch=torch.__version__,
        commit=commit() or platform.node(),
    )
    tail = (
        f"\nMedian error {median(errors):.1%}, largest {max(errors):.1%}; within a tenth: {within} "
        f"of {len(errors)}; inside the band: {inside}.\nCompute and exchange: forecast / "
        "measured, the exchange as far as it is exposed.\n"
    )
    return head + "\n".join(lines) + "\n" + tail


if __name__ == "__main__":
    main()
