"""Momentum on late gradients, and what rescues it, each way at a rate of its own.

    python -m benchmarks.synchrony.rescue --out RESCUE.jsonl --seeds 1 2 3
    python -m benchmarks.synchrony.rescue --out RESCUE.jsonl --page

LeNet on Fashion-MNIST, gradients of four samples, sixteen learners of random speeds under the
simulated clock, all rows at equal samples. A rate that suits one way does not suit another. So each
row, the synchronous one too, first gets the best of RATES by the loss on samples that are held out
of the training set, with a seed that is used for nothing else. Then all train with the other seeds
and are tested. What OUT has already is not trained again.
"""

import argparse
import tempfile
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import firecaffe
from benchmarks.kit import raw_lines
from firecaffe import (
    DataConfig,
    ModelConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.errors import NotFiniteError
from firecaffe.runs.run_folder import read_run_file

SAMPLES, LEAVES = 4, 16
"""Of a gradient, and gradients of a step."""
MOMENTUM = 0.9
SEARCH_SEED, SEARCH_EPOCHS, HOLD_OUT = 101, 0.5, 0.1
EPOCHS = 2.0

RATES = (0.00015, 0.0005, 0.0015, 0.005, 0.015)
"""Of one gradient's update. The synchronous step, of sixteen, has sixteen times as much."""

SYNCHRONOUS = "synchronous, 16 gradients a step"

LATE: dict[str, Any] = {
    "mode": "asynchronous",
    "clock": "simulated",
    "learners": 16,
    "speeds": "gamma",
    "spread": 0.5,
}


@dataclass(frozen=True)
class Row:
    """A way to train."""

    words: dict[str, Any] = field(default_factory=dict)
    """Of [synchrony]."""
    solver: str = "nesterov"
    scale: int = 1
    """Times the rate of one gradient."""


ROWS = {
    SYNCHRONOUS: Row(scale=LEAVES),
    "momentum in each update": Row(LATE, "sgd"),
    "delayed Nesterov": Row({**LATE, "server_momentum": "delayed_nesterov"}),
    "gap-aware": Row({**LATE, "compensate": "gap"}, "sgd"),
    "a / τ": Row({**LATE, "staleness_rate": "inverse"}, "sgd"),
}


def recipe(
    row: Row, rate: float, epochs: float, seed: int, hold_out: float, folder: Path
) -> Recipe:
    steps = round(epochs * 60_000 * (1 - hold_out) / (SAMPLES * LEAVES))
    return Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("fashion-mnist", hold_out=hold_out),
        train=TrainConfig(SAMPLES * LEAVES, SAMPLES, steps=steps, seed=seed, device="cpu"),
        solver=SolverConfig(
            type=row.solver,
            base_lr=rate * row.scale,
            momentum=MOMENTUM,
            weight_decay=5e-4,
            lr_policy="poly",
            power=1.0,
        ),
        synchrony=SynchronyConfig(**row.words),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )


def train(
    name: str, rate: float, epochs: float, seed: int, hold_out: float = 0.0
) -> dict[str, Any]:
    """One training, as a raw line has it. Its loss is that on the held-out samples, if there are
    some, and else on the test set; infinite if it diverged.
    """
    row: dict[str, Any] = {"row": name, "rate": rate, "epochs": epochs, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="firecaffe-rescue-") as parent:
        folder = Path(parent) / "run"
        try:
            result = firecaffe.train(recipe(ROWS[name], rate, epochs, seed, hold_out, folder))
        except NotFiniteError as error:
            return {**row, "loss": inf, "error": 90.0, "diverged_at": error.step}
        split = "validation" if hold_out else "test"
        found = [each for each in result.history if each["kind"] == split][-1]
        late = read_run_file(folder, "result.json")["synchrony"]
        staleness = late["mean_staleness"] if late else 0.0
        percent = 100 - 100 * found["top1"]
        return {**row, "loss": found["loss"], "error": percent, "staleness": staleness}


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--page", action="store_true", help="print the tables of what OUT has")
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    torch.set_num_threads(1)
    raw_lines.begin(given.out)
    for name in ROWS:
        for rate in RATES:
            if not raw_lines.read(given.out, "search", row=name, rate=rate):
                row = train(name, rate, SEARCH_EPOCHS, SEARCH_SEED, HOLD_OUT)
                raw_lines.append(given.out, {"kind": "search", **row})
    for seed in given.seeds:
        for name in ROWS:
            if not raw_lines.read(given.out, "final", row=name, seed=seed):
                rate = raw_lines.best_rate(given.out, name)
                raw_lines.append(given.out, {"kind": "final", **train(name, rate, EPOCHS, seed)})


def page(out: Path) -> str:
    """Both tables."""
    lines = ["| | " + " | ".join(f"{rate:g}" for rate in RATES) + " |"]
    lines.append("|---" * (1 + len(RATES)) + "|")
    for name in ROWS:
        losses = (raw_lines.read(out, "search", row=name, rate=rate) for rate in RATES)
        cells = [f"{each[0]['loss']:.3f}" if each else "" for each in losses]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| | rate | seeds | error, % | to synchronous, points | staleness |"]
    lines.append("|---|---|---|---|---|---|")
    base = {row["seed"]: row["error"] for row in raw_lines.read(out, "final", row=SYNCHRONOUS)}
    for name in ROWS:
        found = [row for row in raw_lines.read(out, "final", row=name) if row["seed"] in base]
        if found:
            apart = [row["error"] - base[row["seed"]] for row in found]
            errors = f"{fmean(row['error'] for row in found):.2f}"
            spread = f"{fmean(apart):+.2f} ({min(apart):+.2f} to {max(apart):+.2f})"
            late = fmean(row.get("staleness", 0.0) for row in found)
            rate = found[0]["rate"]
            lines.append(f"| {name} | {rate:g} | {len(found)} | {errors} | {spread} | {late:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
