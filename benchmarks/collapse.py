"""Late gradients: how a training collapses under them, and what rescues it.

    python -m benchmarks.collapse --page benchmarks/results/synchrony_simulated.md

Caffe's quick network on Fashion-MNIST, gradients of four samples each, learners under the simulated
clock, all rows at equal samples.

collapse   Zhang et al. 2016: one learner is trained well at a rate; thirty learners at that rate
           learn nothing; with the rate divided by the staleness they learn as one does.
momentum   Sixteen learners of random speeds: momentum in each update, which is the usual cause of
           divergence, against momentum that is delayed, and gradients that are corrected.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import firecaffe
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
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.folder import read_run_file

SAMPLES, LEAVES = 4, 16
"""Of a gradient, and gradients of a step."""

CHANCE = 90.0
"""The error, in per cent, of a network that has learned nothing of ten classes."""

SERVED: dict[str, Any] = {"mode": "asynchronous", "clock": "simulated"}
THIRTY = {**SERVED, "learners": 30, "speeds": "gamma", "spread": 0.1}
SIXTEEN = {**SERVED, "learners": 16, "speeds": "gamma", "spread": 0.5}


@dataclass(frozen=True)
class Row:
    """One training."""

    what: str
    words: dict[str, Any]
    rate: float = 1.0
    """Times the rate of one gradient."""
    solver: str = "sgd"


ROWS = {
    "collapse": (
        Row("one learner", {**SERVED, "learners": 1}),
        Row("30 learners, n = 30, fixed rate", THIRTY),
        Row("30 learners, n = 30, a / τ", {**THIRTY, "staleness_rate": "inverse"}),
        Row("30 learners, n = 15, fixed rate", {**THIRTY, "gradients_per_update": 2}),
        Row(
            "30 learners, n = 15, a / τ",
            {**THIRTY, "gradients_per_update": 2, "staleness_rate": "inverse"},
        ),
    ),
    "momentum": (
        Row("one learner", {**SERVED, "learners": 1}),
        Row("synchronous, 16 gradients a step at 16 times the rate", {}, LEAVES, "nesterov"),
        Row("16 learners, momentum in each update", SIXTEEN),
        Row("16 learners, delayed Nesterov", {**SIXTEEN, "server_momentum": "delayed_nesterov"}),
        Row("16 learners, gap-aware", {**SIXTEEN, "compensate": "gap"}),
        Row("16 learners, delay compensation", {**SIXTEEN, "compensate": "delay"}),
        Row("16 learners, a / τ", {**SIXTEEN, "staleness_rate": "inverse"}),
    ),
}
MOMENTUM = 0.9

PAGE = """# Late gradients, under the simulated clock

    {command}

{about}

{tables}
"""

ABOUT = """Caffe's quick network (`cifar10_quick`) on Fashion-MNIST, {epochs:g} epochs, gradients of
{samples} samples, momentum {momentum:g}, a rate of {rate:g} an update, divided by 10 after four
fifths; seeds: {seeds}. The error is that on the test set at the end, the loss the mean of the last
{last} steps of {step} samples. A row that diverged has the step. Seconds are those of training and
evaluation. {cpu}, {cores} cores, torch {torch}, commit {commit}, {date}."""

LAST = 20
"""Steps over which the loss at the end is averaged."""

HEAD = """## {part}

| | error, % | loss at the end | staleness, mean (most) | seconds |
|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True)
class Found:
    """What a training has come to."""

    error: float
    loss: float
    staleness: str
    seconds: float
    diverged_at: int = 0
    """The step; 0 if it did not."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, help="where the result page goes")
    parser.add_argument("--only", choices=ROWS, help="one of the two parts")
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--base-lr", type=float, default=0.001)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables = []
    for part in [given.only] if given.only else ROWS:
        rows = []
        for row in ROWS[part]:
            found = [run(row, given.epochs, given.base_lr, seed) for seed in range(given.seeds)]
            rows.append(line(row.what, found))
            print(rows[-1], flush=True)
        tables.append(HEAD.format(part=part.capitalize(), rows="\n".join(rows)))
    about = ABOUT.format(
        epochs=given.epochs,
        samples=SAMPLES,
        momentum=MOMENTUM,
        rate=given.base_lr,
        seeds=given.seeds,
        last=LAST,
        step=SAMPLES * LEAVES,
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )
    command = " ".join(["python", "-m", "benchmarks.collapse", *sys.argv[1:]])
    text = PAGE.format(command=command, about=about, tables="\n".join(tables))
    if given.page is not None:
        given.page.write_text(text)
    return 0


def line(what: str, found: list[Found]) -> str:
    """A row of the table: medians over the seeds, and the spread of the error."""
    errors = [each.error for each in found]
    shown = f"{statistics.median(errors):.2f}"
    if len(found) > 1:
        shown += f" ({min(errors):.2f} to {max(errors):.2f})"
    gone = [str(each.diverged_at) for each in found if each.diverged_at]
    if gone:
        shown += f", diverged at step {', '.join(gone)}"
    loss = statistics.median(each.loss for each in found)
    seconds = statistics.median(each.seconds for each in found)
    return f"| {what} | {shown} | {loss:.3f} | {found[0].staleness} | {seconds:.0f} |"


def recipe(row: Row, epochs: float, base_lr: float, seed: int) -> Recipe:
    steps = round(epochs * 60_000 / (SAMPLES * LEAVES))
    return Recipe(
        model=ModelConfig("cifar10_quick"),
        # Caffe's range of 0 to 255 around the mean.
        data=DataConfig(
            "fashion-mnist",
            augment="caffe",
            mirror=True,
            pad=2,
            crop=32,
            mean=[0.286],
            std=[1 / 255],
        ),
        train=TrainConfig(SAMPLES * LEAVES, SAMPLES, steps=steps, seed=seed, device="cpu"),
        solver=SolverConfig(
            type=row.solver,
            base_lr=base_lr * row.rate,
            momentum=MOMENTUM,
            weight_decay=0.004,
            lr_policy="multistep",
            gamma=0.1,
            stepvalue=[round(0.8 * steps)],
        ),
        synchrony=SynchronyConfig(**row.words),
    )


def run(row: Row, epochs: float, base_lr: float, seed: int) -> Found:
    """Trains, quietly, in this process."""
    made, start = recipe(row, epochs, base_lr, seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="firecaffe-collapse-") as parent:
        folder = Path(parent) / "run"
        made = replace(made, run=RunConfig(folder=str(folder), tensorboard=False))
        try:
            result = firecaffe.train(made)
        except NotFiniteError as error:
            seconds = time.perf_counter() - start
            return Found(CHANCE, float("nan"), "", seconds, error.step)
        losses = [each["loss"] for each in result.history if each["kind"] == "train"]
        late = read_run_file(folder, "result.json")["synchrony"]
        staleness = ""
        if late:
            staleness = f"{late['mean_staleness']:.1f} ({max(map(int, late['staleness']))})"
        loss = statistics.fmean(losses[-LAST:])
        return Found(100 - 100 * result.top1, loss, staleness, time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
