"""A head that is updated several times in a step: how the loss falls, against once.

    python -m benchmarks.head_updates --out HEAD.jsonl
    python -m benchmarks.head_updates --out HEAD.jsonl --page

Caffe's LeNet on Fashion-MNIST, whose two fully connected layers are updated once in a step by 128
samples, or four times by 32. Everything else, and the rate, is the same. One worker: any number
ends in the same bits (`tests/ranks/test_layouts.py`).
"""

import argparse
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch

import firecaffe
from benchmarks import raw_lines
from firecaffe import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.runs.recorded import recorded_of

UPDATES = 1, 4
STEPS, BATCH, MICRO_BATCH = 200, 128, 16
TOLD = 10, 25, 50, 100, 200
"""Steps whose loss is told, each as the mean over the last ten."""


def recipe(updates: int, seed: int, data: str, folder: str) -> Recipe:
    split = {"ip1": "neurons", "ip2": "inputs"}
    return Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("fashion-mnist", data),
        train=TrainConfig(BATCH, MICRO_BATCH, steps=STEPS, seed=seed, device="cpu"),
        solver=SolverConfig(base_lr=0.01, momentum=0.9, weight_decay=5e-4),
        parallel=ParallelConfig(1, 1, split, 1, "one_weird_trick", head_updates=updates),
        run=RunConfig(folder=folder, tensorboard=False),
    )


def train(updates: int, seed: int, data: str) -> dict[str, Any]:
    """One training, as a raw line has it."""
    with TemporaryDirectory(prefix="firecaffe-head-") as parent:
        folder = Path(parent) / "run"
        result = firecaffe.train(recipe(updates, seed, data, str(folder)))
        losses = [each for each in recorded_of(folder).losses.values() if each is not None]
    told = {"losses": losses, "test_loss": result.test_loss, "top1": result.metrics["top1"]}
    return {"kind": "run", "updates": updates, "seed": seed, **told}


def page(out: Path) -> str:
    """A row for each number of updates."""
    steps = [f"step {step}" for step in TOLD]
    lines = [
        f"| updates of the head in a step | n | {' | '.join(steps)} | test loss | top-1 |",
        "|---" * (len(TOLD) + 4) + "|",
    ]
    for updates in UPDATES:
        runs = raw_lines.read(out, "run", updates=updates)
        at = [[mean(run["losses"][step - 10 : step]) for run in runs] for step in TOLD]
        cells = [_shown(each) for each in [*at, [run["test_loss"] for run in runs]]]
        top1 = _shown([100 * run["top1"] for run in runs], 1)
        lines.append(f"| {updates} | {len(runs)} | {' | '.join(cells)} | {top1} % |")
    return "\n".join(lines)


def _shown(values: list[float], digits: int = 3) -> str:
    least, most = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return f"{mean(values):.{digits}f} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="raw JSON lines")
    parser.add_argument("--data", default="", help="the folder of Fashion-MNIST")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="print the table of what OUT has")
    given = parser.parse_args()
    if given.page:
        print(page(given.out))
        return
    raw_lines.begin(given.out)
    torch.set_num_threads(1)
    for seed in range(1, given.seeds + 1):
        for updates in UPDATES:
            raw_lines.append(given.out, train(updates, seed, given.data))


if __name__ == "__main__":
    main()
