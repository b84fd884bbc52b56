"""Thirty learners under the simulated clock: the collapse at a fixed rate, and the rescue.

    python -m benchmarks.synchrony.collapse --out COLLAPSE.jsonl --seeds 1
    python -m benchmarks.synchrony.collapse --out COLLAPSE.jsonl --page

Zhang et al. 2016: one learner trains well at a rate; thirty learners at that rate learn nothing;
with the rate divided by the staleness they learn as one does, if they have the time. A rate divided
by 29 needs 29 times the updates. So that half an hour is enough: Caffe's quick network at half its
width and height, on the first thousand images of Fashion-MNIST, gradients of sixteen samples and no
momentum (`benchmarks.synchrony.rescue` is about momentum), all rows at equal samples.

First one learner, and each row with a / τ, gets the best of RATES by the loss on samples that are
held out of the training set, with a seed that is used for nothing else. The rows at a fixed rate
have one learner's. Or all rows have the one that `--rate` says. What OUT has already is not trained
again, and `--rows` divides the work among processes.
"""

import argparse
import tempfile
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import firecaffe
from benchmarks.kit import raw_lines
from firecaffe import (
    DataConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.caffe import fillers
from firecaffe.data import TensorDataset
from firecaffe.data.dataset import Dataset
from firecaffe.data.datasets import open_data
from firecaffe.errors import DivergedError, NotFiniteError
from firecaffe.models import build_model
from firecaffe.runs.run_folder import read_run_file

SIDE, SAMPLES, LEAVES, IMAGES = 16, 16, 4, 1000
"""Pixels; samples of a gradient; gradients of a step; images that are trained on."""

SEARCH_SEED, SEARCH_EPOCHS, HOLD_OUT = 101, 30, 0.1
EPOCHS = 2400
RATES = (0.02, 0.05, 0.1, 0.2)

WARM_STEPS = 100
"""Synchronous steps at the beginning of thirty learners. At the very beginning all have the first
weights, so that their gradients are nearly the same and come with τ = 0, 1, 2, …: together they
are 1 + 1 + 1/2 + 1/3 + … = 5 times one."""

SERVED: dict[str, Any] = {"mode": "asynchronous", "clock": "simulated"}
GAMMA = {"speeds": "gamma", "spread": 0.1}
THIRTY = {**SERVED, **GAMMA, "learners": 30, "warm_steps": WARM_STEPS}
FIFTEEN = {**THIRTY, "gradients_per_update": 2}
ONE = "one learner"
ROWS = {
    ONE: {**SERVED, "learners": 1},
    "n = 30, fixed rate": THIRTY,
    "n = 30, a / τ": {**THIRTY, "staleness_rate": "inverse"},
    "n = 15, fixed rate": FIFTEEN,
    "n = 15, a / τ": {**FIFTEEN, "staleness_rate": "inverse"},
}
"""Words of [synchrony]. n is the staleness that is to be expected: learners by gradients of an
update."""


def network() -> nn.Module:
    """Caffe's quick network for images of 16 x 16, with He's filler to begin at once."""
    built = build_model("cifar10_quick", num_classes=10, in_channels=1)
    built.set_submodule("ip1", nn.Linear(64 * (SIDE // 8) ** 2, 64))
    fillers.fill_all(built, fillers.msra)
    return built


def halved(images: Dataset, most: int) -> TensorDataset:
    """The first images of 28 x 28 as 14 x 14, each pixel the mean of four."""
    pixels, labels = images.batch(torch.arange(min(most, len(images))))
    assert isinstance(pixels, Tensor)
    means = nn.functional.avg_pool2d(pixels.float(), 2)
    return TensorDataset(means.round().to(torch.uint8), labels, 10)


def recipe(words: dict[str, Any], rate: float, epochs: int, seed: int, folder: Path) -> Recipe:
    steps = round(epochs * IMAGES / (SAMPLES * LEAVES))
    return Recipe(
        data=DataConfig(pad=1, crop=SIDE, mean=[0.286], std=[0.353]),
        train=TrainConfig(SAMPLES * LEAVES, SAMPLES, steps=steps, seed=seed, device="cpu"),
        solver=SolverConfig(
            type="sgd",
            base_lr=rate,
            momentum=0.0,
            weight_decay=5e-4,
            lr_policy="multistep",
            gamma=0.1,
            stepvalue=[round(0.8 * steps)],
        ),
        synchrony=SynchronyConfig(**words),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )


def train(name: str, rate: float, epochs: int, seed: int, hold_out: float = 0.0) -> dict[str, Any]:
    """One training, as a raw line has it. It is tested on held-out samples if there are some, else
    on the test set; the loss is infinite if it diverged.
    """
    data = open_data(DataConfig("fashion-mnist", hold_out=hold_out))
    test_set = data.test if data.validation is None else data.validation
    row: dict[str, Any] = {"row": name, "rate": rate, "epochs": epochs, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="firecaffe-collapse-") as parent:
        folder = Path(parent) / "run"
        made = recipe(ROWS[name], rate, epochs, seed, folder)
        try:
            sets = halved(data.train, IMAGES), halved(test_set, len(test_set))
            firecaffe.train(made, network, *sets)
        except (NotFiniteError, DivergedError) as error:
            return {**row, "loss": inf, "error": 90.0, "diverged_at": error.step}
        result = read_run_file(folder, "result.json")
    late = result["synchrony"]["mean_staleness"]
    return {**row, "loss": result["loss"], "error": 100 - 100 * result["top1"], "staleness": late}


def searched(name: str) -> str:
    """The row whose rate a row has."""
    return ONE if ROWS[name].get("staleness_rate") is None else name


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--rate", type=float, default=0.0, help="of all rows, without a search")
    parser.add_argument("--page", action="store_true", help="print the tables of what OUT has")
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    torch.set_num_threads(1)
    raw_lines.begin(given.out)
    for name in () if given.rate else dict.fromkeys(map(searched, given.rows)):
        for rate in RATES:
            if not raw_lines.read(given.out, "search", row=name, rate=rate):
                found = train(name, rate, SEARCH_EPOCHS, SEARCH_SEED, HOLD_OUT)
                raw_lines.append(given.out, {"kind": "search", **found})
    for seed in given.seeds:
        for name in given.rows:
            if not raw_lines.read(given.out, "final", row=name, seed=seed, epochs=given.epochs):
                rate = given.rate or raw_lines.best_rate(given.out, searched(name))
                found = train(name, rate, given.epochs, seed)
                raw_lines.append(given.out, {"kind": "final", **found})


def page(out: Path) -> str:
    """Both tables."""
    lines = ["| | rate | loss on held-out samples |", "|---|---|---|"]
    lines += [
        f"| {row['row']} | {row['rate']:g} | {row['loss']:.3f} |"
        for row in raw_lines.read(out, "search")
    ]
    lines += ["", "| | seeds | epochs | error, % | to one learner, points | staleness |"]
    lines.append("|---|---|---|---|---|---|")
    finals = raw_lines.read(out, "final")
    base = {(row["seed"], row["epochs"]): row["error"] for row in finals if row["row"] == ONE}
    for name in ROWS:
        rows = [row for row in finals if row["row"] == name]
        for epochs in sorted({row["epochs"] for row in rows}):
            found = [row for row in rows if row["epochs"] == epochs]
            error = f"{fmean(row['error'] for row in found):.2f}"
            gone = ", ".join(str(row["diverged_at"]) for row in found if "diverged_at" in row)
            error += f", diverged at step {gone}" if gone else ""
            apart = [
                row["error"] - base[key]
                for row in found
                if (key := (row["seed"], row["epochs"])) in base
            ]
            spread = f"{fmean(apart):+.2f}" if apart else ""
            late = fmean(row.get("staleness", 0.0) for row in found)
            lines.append(
                f"| {name} | {len(found)} | {epochs:g} | {error} | {spread} | {late:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
