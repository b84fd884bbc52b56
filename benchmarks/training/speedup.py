"""Speed-up over emulated hosts, forecast and measured, and the weights that all trainings end in.

    sudo -E python -m benchmarks.training.speedup     # writes results/speedup.json; 15 minutes
    python -m benchmarks.training.speedup_picture     # draws docs/speedup.svg from that record

`firecaffe check` looks over two hosts, once. Each training, on 1, 2, 4 and 8 hosts, is then
forecast from that one file before its first step, and reads its forecast from its own folder. Each
host has the same share of this machine's processors, however many hosts there are, so that one
worker is as slow alone as beside seven others. The global batch is the same too.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.planner.forecast_emulated import KEPT
from firecaffe.data import TensorDataset
from firecaffe.data.generated import generate
from firecaffe.planner.cluster import load_cluster
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.rank_times import explain, read_timings
from firecaffe.runs.run_folder import read_run_file
from firecaffe.runs.score import score

RECORD = Path(__file__).parents[1] / "results" / "speedup.json"
MODEL = "nin_cifar"
STEPS = 10
HOSTS = (1, 2, 4, 8)
EXCHANGES = ("parameter_server", "halving_doubling")
RATE = 200_000_000
CHECKED_HOSTS = 2
RUNS = 3
"""Of each training, in turns."""

RECIPE = """
[model]
name = "{model}"
[data]
name = "benchmarks.training.speedup:few_images"
[train]
global_batch_size = 64
micro_batch_size = 8
steps = {steps}
[run]
tensorboard = false
"""


def few_images() -> tuple[TensorDataset, TensorDataset]:
    """As many as are trained on, for a host of a quarter of a core takes long to make and to
    evaluate more.
    """
    return generate(0, num_train=1024, num_test=64)


@dataclass(frozen=True)
class Row:
    """One training: the seconds of a step, and the digest of the last weights of each run."""

    hosts: int
    exchange: str
    forecast_s: float
    low_s: float
    high_s: float
    runs_s: tuple[float, ...]
    weights_sha256: tuple[str, ...]

    @property
    def measured_s(self) -> float:
        return median(self.runs_s)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=list(HOSTS))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args(argv)
    rows: dict[tuple[int, str], Row] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, file = folder / "recipe.toml", folder / "cluster.toml"
        recipe.write_text(RECIPE.format(model=MODEL, steps=STEPS), encoding="utf-8")
        look_over(recipe, file)
        for number in range(given.runs):
            for hosts in given.hosts:
                for exchange in EXCHANGES if hosts > 1 else EXCHANGES[:1]:
                    run = folder / f"{hosts}-{exchange}-{number}"
                    row = train(recipe, file, run, hosts, exchange)
                    print(row, file=sys.stderr, flush=True)
                    before = rows.get((hosts, exchange))
                    rows[hosts, exchange] = row if before is None else both(before, row)
    text = json.dumps(
        {**conditions(given.runs), "rows": [asdict(row) for row in rows.values()]}, indent=1
    )
    given.record.write_text(text + "\n", encoding="utf-8")


def processors() -> float:
    """Of one host."""
    return (1 - KEPT) * (os.cpu_count() or 1) / max(HOSTS)


def look_over(recipe: Path, file: Path) -> None:
    with VirtualCluster(CHECKED_HOSTS, RATE, processors=processors()) as cluster:
        words = ["check", str(recipe), "--write", str(file), "--folder", str(recipe.parent)]
        cluster.run([sys.executable, "-m", "firecaffe", *words], timeout_s=600.0)
    assert load_cluster(str(file)).device.measured


def train(recipe: Path, file: Path, run: Path, hosts: int, exchange: str) -> Row:
    words = ["--run.folder", str(run), "--run.cluster", str(file)]
    words += ["--exchange.algorithm", exchange]
    with VirtualCluster(hosts, RATE, processors=processors()) as cluster:
        command = [sys.executable, "-m", "firecaffe", "train", str(recipe), *words]
        cluster.run(command, timeout_s=600.0)
    found = score(run, read_timings(run), explain(run))
    assert found is not None, "no forecast was made"
    step = found.step
    digest = read_run_file(run, "result.json")["weights_sha256"]
    return Row(
        hosts, exchange, step.forecast_s, step.low_s, step.high_s, (step.measured_s,), (digest,)
    )


def both(a: Row, b: Row) -> Row:
    """The runs of two rows of one training; their forecasts come from one file and are the same."""
    return replace(
        a, runs_s=a.runs_s + b.runs_s, weights_sha256=a.weights_sha256 + b.weights_sha256
    )


def conditions(runs: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "global_batch_size": 64,
        "steps": STEPS - 1,
        "runs": runs,
        "rate_bits_per_s": RATE,
        "processors_of_a_host": processors(),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
