"""The gradient noise scale: what measuring it costs, and what it says of batches.

    python -m benchmarks.training.noise_scale --page benchmarks/results/noise_scale.md  # 1 hour

Cost: steps that measure and steps that do not take turns, three of one batch at a time; the third
is a second one without, the control. Batches: two networks are trained until the loss of held-out
images reaches a target, at batches of 16 to 4,096, each with the best of some rates, under three
seeds. The samples that this takes follow E = E_min (1 + B / B_crit) (McCandlish et al. 2018); the
page shows B_crit beside the noise scale that was measured on the way. Batches that the file
`--kept` has are not trained again; `benchmarks.planner.epochs_by_noise` forecasts them.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn, optim

from benchmarks.kit.our_step import OurStep, route_of
from benchmarks.training.against_loop import make_dataset
from firecaffe.cluster.world import World, join
from firecaffe.data import Batches, DataConfig, Dataset, SampleOrder, open_data
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models import build_model, classification_loss
from firecaffe.recipe.sections import TrainConfig
from firecaffe.runs.environment import commit, cpu_name
from firecaffe.runs.noise_scale import GradientNorms, NoiseScale, noise_scale
from firecaffe.training.modes.every_step import EveryStep
from firecaffe.training.outcome import EVERY, StepResult
from firecaffe.transport.exchange import Exchange

COSTS = (
    ("lenet", 8, 8, 60),
    ("lenet", 1, 64, 40),
    ("nin_small", 8, 8, 40),
    ("nin_cifar", 8, 8, 12),
    ("alexnet", 2, 4, 9),
)
"""Networks, samples of a micro-batch, micro-batches, and rounds. Most of AlexNet is weights."""

BATCHES = (16, 64, 256, 1024, 4096)
SEEDS = (1, 2, 3)
MAX_SAMPLES = 600_000
HELD_OUT = 1000
LOOK = 512
"""Samples between two looks at the held-out loss, or a batch if that is more."""


@dataclass(frozen=True)
class Net:
    solver: str
    rate: float
    """At a batch of 64; it grows with the root of the batch."""
    target: float
    """The held-out loss at which a training ends."""


NETS = {"lenet": Net("sgd", 0.01, 0.55), "nin_small": Net("adam", 0.003, 0.75)}


class Steps:
    """Steps of a network on this process alone, of which some are measured."""

    def __init__(
        self, name: str, data: Dataset, sizes: tuple[int, int], seed: int, world: World
    ) -> None:
        batch, micro = sizes
        torch.manual_seed(seed)
        self.model: nn.Module = build_model(name)
        self.order = SampleOrder(seed, len(data), batch, micro)
        batches = Batches(data, self.order, DataConfig(mean=[0.286], std=[0.353]))
        if name not in NETS or NETS[name].solver == "sgd":
            optimizer: optim.Optimizer = optim.SGD(self.model.parameters(), 0.01, 0.9, foreach=True)
        else:
            optimizer = optim.Adam(self.model.parameters(), foreach=True)
        config = TrainConfig(global_batch_size=batch, micro_batch_size=micro, seed=seed)
        words = ExchangeConfig(algorithm="tree")
        exchange = Exchange(world, route_of(world, words, config.num_micro_batches))
        self._ours = OurStep(
            self.model, classification_loss, batches, config, optimizer, words, exchange
        )
        plain = self._ours.stepper
        self._measures = False
        made = plain.holding, plain.update, plain.batches, plain.leaves
        self._stepper = EveryStep(*made, is_measured=lambda _: self._measures)

    def __call__(self, step: int, rate: float, measures: bool) -> StepResult:
        self._measures = measures
        return self._stepper.run(step, rate).read()

    def close(self) -> None:
        self._ours.close()


def cost_row(name: str, micro: int, leaves: int, rounds: int, world: World) -> list[str]:
    """The cells of a row: the step, and its ratio with the norms and again without."""
    steps = Steps(name, make_dataset(name), (micro * leaves, micro), 0, world)
    times: list[dict[str, float]] = []
    kinds = ["without", "with", "control"]
    for number in range(rounds + 2):
        turn = dict[str, float]()
        for kind in kinds:
            start = time.perf_counter()
            steps(0, 1e-4, kind == "with")
            turn[kind] = time.perf_counter() - start
        kinds = [*kinds[1:], kinds[0]]
        if number > 1:  # the first ones warm up
            times.append(turn)
    weights = sum(weight.numel() for weight in steps.model.parameters())
    steps.close()
    ratios, controls = (
        [turn[kind] / turn["without"] for turn in times] for kind in ("with", "control")
    )
    share = (statistics.median(ratios) - 1) / EVERY
    step_s = statistics.median(turn["without"] for turn in times)
    cells = [name, f"{weights:,}", f"{leaves} of {micro}", f"{step_s * 1e3:,.1f}"]
    return [*cells, _spread(ratios), _spread(controls), f"{share:.2%}", str(len(times))]


def _spread(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


@dataclass(frozen=True)
class Reached:
    samples: int | None
    """The samples until the target was reached; None: it was not."""
    scale: NoiseScale | None


@dataclass(frozen=True)
class BatchRow:
    """A network's trainings with the best rate of a batch."""

    network: str
    batch: int
    rate: float
    samples: list[int | None]
    """Of each seed, in order of size."""
    scale: tuple[float | None, float, float | None] | None
    """Of the seed in the middle: the noise scale, and its band."""

    @property
    def middle(self) -> int | None:
        """The median of the seeds' samples; None if one did not reach the target."""
        return self.samples[len(self.samples) // 2] if None not in self.samples else None

    @classmethod
    def of(cls, network: str, batch: int, rate: float, reached: Sequence[Reached]) -> "BatchRow":
        samples = sorted((one.samples for one in reached), key=lambda count: count or math.inf)
        scales = [one.scale for one in reached if one.scale is not None]
        scales.sort(key=lambda scale: scale.samples or math.inf)
        scale = scales[len(scales) // 2] if scales else None
        noise = None if scale is None else (scale.samples, scale.low, scale.high)
        return cls(network, batch, rate, samples, noise)


def read_kept(path: Path | None) -> list[BatchRow]:
    if path is None or not path.exists():
        return []
    return [BatchRow(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def train(name: str, batch: int, rate: float, seed: int, data: str, world: World) -> Reached:
    """Train until the target; the norms are measured in each step of a full batch."""
    sets, net = open_data(DataConfig(data)), NETS[name]
    sizes = batch, min(64, batch // 2)
    steps = Steps(name, sets.train, sizes, seed, world)
    images, labels = sets.test.batch(torch.arange(HELD_OUT))
    images = (images.float() / 255 - 0.286) / 0.353
    norms, samples, looked, step = list[GradientNorms](), 0, 0, 0
    reached = None
    while samples < MAX_SAMPLES:
        is_full = steps.order.samples_in_step(step) == batch
        result = steps(step, rate * min(1.0, (step + 1) / 20), is_full)
        step, samples = step + 1, samples + result.samples
        if result.squares is not None:
            of_leaves, of_mean = result.squares
            norms.append(GradientNorms(step, of_leaves * sizes[1] / batch, of_mean))
        if samples - looked >= LOOK:
            looked = samples
            loss = held_out_loss(steps.model, images, labels)
            if loss <= net.target:
                reached = samples
            if reached or not math.isfinite(loss):
                break
    steps.close()
    return Reached(reached, noise_scale(norms, sizes[1], batch))


@torch.no_grad()
def held_out_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    loss = classification_loss(model(images), labels)
    model.train()
    return float(loss)


def search(
    name: str, batch: int, factors: Sequence[float], data: str, world: World
) -> tuple[float, list[Reached]]:
    """The best of the rates by the first seed, and the trainings with it under all seeds."""
    net, first = NETS[name], dict[float, Reached]()
    for factor in factors:
        rate = factor * net.rate * math.sqrt(batch / 64)
        first[rate] = train(name, batch, rate, SEEDS[0], data, world)
    best = min(first, key=lambda rate: first[rate].samples or math.inf)
    others = [train(name, batch, best, seed, data, world) for seed in SEEDS[1:]]
    return best, [first[best], *others]


def critical_batch(samples: Mapping[int, float]) -> tuple[float, float]:
    """E_min and B_crit of E = E_min (1 + B / B_crit), by least squares of log E on a fine grid."""
    best = math.inf, 0.0, 0.0
    for place in range(400):
        critical = 4.0 * 1.03**place
        offsets = [math.log(e) - math.log1p(b / critical) for b, e in samples.items()]
        error, least = statistics.pvariance(offsets), math.exp(statistics.fmean(offsets))
        best = min(best, (error, least, critical))
    return best[1:]


HEAD = """# The gradient noise scale: its cost, and what it says

    {command}

{cpu}, {cores} cores (1 used), torch {torch}, commit {commit}, {date}.
"""

COST_PAGE = """
## Cost

A step that measures the norms, and a second one that does not (the control), over one without, of
the same batch, in turns: median and quartiles. One step of {every}, or fewer, is measured; "share"
is the cost over all steps.

| network | weights | micro-batches | step, ms | with | control | share | n |
|---|---|---|---|---|---|---|---|
{costs}
"""

BATCHES_PAGE = """
## Batches

{data}, until the loss of {held_out} held-out images is at most {targets}. Rates: the best of
{factors} times the network's at a batch of 64, times the root of the batch, by the first seed;
constant after 20 steps of warm-up. Samples: median (least to most) of {seeds} seeds. Noise scale:
the median seed's, with its 80 % band, at the end of the training.

| network | batch | rate | samples | noise scale | band |
|---|---|---|---|---|---|
{rows}

{fits}
"""


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["cost", "batches"])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--networks", nargs="+", default=list(NETS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--factors", nargs="+", type=float, default=[0.5, 1.0, 2.0])
    parser.add_argument("--kept", type=Path, help="a file that trained batches are kept in")
    parser.add_argument("--page", type=Path, help="where the result page goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = HEAD.format(
        command=" ".join(["python", "-m", "benchmarks.training.noise_scale", *sys.argv[1:]]),
        cpu=cpu_name(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        commit=commit(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )
    with join("cpu") as world:
        if "cost" in given.parts:
            rows = (" | ".join(cost_row(*case, world)) for case in COSTS)
            costs = "\n".join(f"| {row} |" for row in rows)
            text += COST_PAGE.format(every=EVERY, costs=costs)
        if "batches" in given.parts:
            text += _batches_page(given, world)
    print(text)
    if given.page is not None:
        given.page.write_text(text)


def _batches_page(given: argparse.Namespace, world: World) -> str:
    kept = {(row.network, row.batch): row for row in read_kept(given.kept)}
    rows = list[BatchRow]()
    for name in given.networks:
        for batch in given.batches:
            row = kept.get((name, batch))
            if row is None:
                row = BatchRow.of(
                    name, batch, *search(name, batch, given.factors, given.data, world)
                )
                print(_row(row), file=sys.stderr, flush=True)
                if given.kept is not None:
                    with given.kept.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
            rows.append(row)
    by_name = {name: [row for row in rows if row.network == name] for name in given.networks}
    return BATCHES_PAGE.format(
        data=given.data,
        held_out=HELD_OUT,
        targets=", ".join(f"{NETS[name].target} ({name})" for name in given.networks),
        factors=", ".join(f"{factor:g}" for factor in given.factors),
        seeds=len(SEEDS),
        rows="\n".join(map(_row, rows)),
        fits="\n".join(_fit(name, of_name) for name, of_name in by_name.items()),
    )


def _row(row: BatchRow) -> str:
    shown = [f"{count:,}" if count else f"over {MAX_SAMPLES:,}" for count in row.samples]
    least, middle, most = shown[0], shown[len(shown) // 2], shown[-1]
    value, band = "none", ""
    if row.scale is not None:
        samples, low, high = row.scale
        value = "none" if samples is None else f"{samples:,.0f}"
        band = f"{low:,.0f} to " + ("…" if high is None else f"{high:,.0f}")
    cells = [row.network, f"{row.batch:,}", f"{row.rate:.3g}", f"{middle} ({least} to {most})"]
    return f"| {' | '.join([*cells, value, band])} |"


def _fit(name: str, rows: Sequence[BatchRow]) -> str:
    needed = {row.batch: row.middle for row in rows if row.middle is not None}
    scales = [row.scale[0] for row in rows if row.scale and row.scale[0]]
    if len(needed) < 3 or not scales:
        return f"- {name}: too few batches reached the target for a fit."
    least, critical = critical_batch(needed)
    middle = statistics.median(scales)
    return (
        f"- {name}: samples follow E = {least:,.0f} (1 + B / {critical:,.0f}). The median noise "
        f"scale is {middle:,.0f}; B_crit is {critical / middle:.2f} times that."
    )


if __name__ == "__main__":
    main()
