"""Where the time of a step goes: the records of two pictures of the pages.

    sudo -E python -m benchmarks.training.traces   # writes results/traces.json; 3 minutes
    python -m benchmarks.pictures           # draws docs/pictures from this record and others

The timeline is of a real training on emulated hosts, as each rank wrote it down. The shares by type
of layer are what `firecaffe bench step` measures of one worker.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulated.virtual_cluster import VirtualCluster
from benchmarks.training.speedup import MODEL, RECIPE
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.rank_times import require_timings

RECORD = Path(__file__).parents[1] / "results" / "traces.json"
HOSTS = 4
RATE = 200_000_000
FIRST, LAST = 5, 8
"""The steps that are kept, after the warm ones."""
NETWORKS = ("nin_small", "googlenet_small_bn", "vgg_small_bn")
PARTS = ("data_s", "compute_s", "exposed_communication_s", "update_s", "step_s")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    record = {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "commit": commit(),
        "timeline": {
            "model": MODEL,
            "hosts": HOSTS,
            "rate_bits_per_s": RATE,
            "first_step": FIRST,
            "ranks": timeline(),
        },
        "time_by_type_s": {name: time_by_type_s(name) for name in NETWORKS},
    }
    given.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def timeline() -> list[list[dict[str, float]]]:
    """Return for each rank the parts of its steps from FIRST to LAST."""
    with tempfile.TemporaryDirectory() as name:
        recipe, run = Path(name, "recipe.toml"), Path(name, "run")
        recipe.write_text(RECIPE.format(model=MODEL, steps=LAST + 1), encoding="utf-8")
        command = [sys.executable, "-m", "firecaffe", "train", str(recipe)]
        with VirtualCluster(HOSTS, RATE, processors=0.9 * (os.cpu_count() or 1) / HOSTS) as cluster:
            cluster.run([*command, "--run.folder", str(run)], timeout_s=600.0)
        rows = require_timings(run)
    return [
        [{part: row[part] for part in PARTS} for row in rows[rank] if FIRST <= row["step"] <= LAST]
        for rank in sorted(rows)
    ]


def time_by_type_s(network: str) -> dict[str, float]:
    command = [sys.executable, "-m", "firecaffe", "bench", "step", "--model", network]
    words = ["--sizes", "8", "--seconds", "2", "--json"]
    shown = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
    rows: list[dict[str, Any]] = json.loads(shown)
    return dict(rows[0]["time_by_type_s"])


if __name__ == "__main__":
    main()
