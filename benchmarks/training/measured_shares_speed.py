"""The training of `measured_shares speed`: on one worker, and as a rank of four."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.distributed as dist

import firecaffe
from benchmarks.kit import raw_lines
from benchmarks.kit.from_first import from_first
from benchmarks.kit.step_starts import STARTS
from firecaffe.data import TensorDataset
from firecaffe.data.generated import generate
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models import ModelConfig
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.runs.run_folder import RunConfig
from firecaffe.solvers.config import SolverConfig
from firecaffe.synchrony.config import SynchronyConfig

HOSTS = 4
RATE = 200_000_000
PROCESSORS = [0.4, 0.4, 0.4, 0.2]
"""Of a core. Two cores have something left for the kernel's work on packets."""

NUM_LEAVES = 128
"""So many that whole micro-batches allow 1.73 of the ideal 1.75; docs/howto/mixed_gpus.md."""
MICRO_BATCH_SIZE = 4
STEPS = 19
"""All full: the epoch's last step, the 20th, is not."""
WARM_UP = 6
"""Steps in which the shares are found."""

RECIPE = Recipe(
    model=ModelConfig("googlenet_small_bn"),
    train=TrainConfig(
        global_batch_size=NUM_LEAVES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
        steps=STEPS,
        seed=1,
        device="cpu",
    ),
    solver=SolverConfig(type="nesterov", base_lr=0.02, momentum=0.9, weight_decay=5e-4),
    exchange=ExchangeConfig(algorithm="halving_doubling"),
)


def train(shares: Literal["equal", "measured"], folder: Path) -> firecaffe.Result:
    """Trains in the world that there is."""
    recipe = replace(
        RECIPE,
        synchrony=SynchronyConfig(shares=shares, shares_every=3),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )
    images, labels = generate()[0].batch(torch.arange(10_000))
    few = torch.arange(100)
    return firecaffe.train(
        recipe,
        train_set=TensorDataset(images, labels, 10),
        test_set=TensorDataset(images[few], labels[few], 10),
    )


def alone() -> str:
    """The digest of what one worker ends in."""
    with TemporaryDirectory() as folder:
        return train("equal", Path(folder) / "run").state_sha256


def rank_program(rounds: int, digest: str, out: Path) -> None:
    """Trains with equal and measured shares in turns; rank 0 writes a row for each run.

    Raises: SystemExit if a run does not end in the bits of one worker.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds: tuple[Literal["equal", "measured"], ...] = ("equal", "measured")
    with TemporaryDirectory() as place:
        folder = Path(from_first(place))
        for number in range(rounds):
            for shares in kinds if number % 2 == 0 else kinds[::-1]:
                result = train(shares, folder / f"{number}-{shares}")
                if result.state_sha256 != digest:
                    raise SystemExit(f"{shares} shares end in other bits than one worker")
                if dist.get_rank() == 0:
                    raw_lines.append(out, _row(shares, number, result, STARTS))
    dist.destroy_process_group()


def _row(
    shares: str, number: int, result: firecaffe.Result, starts: list[float]
) -> dict[str, object]:
    taken_s = starts[-1] - starts[WARM_UP]
    images = (len(starts) - 1 - WARM_UP) * RECIPE.train.global_batch_size
    balance = json.loads((result.folder / "result.json").read_text())["balance"]
    equal = [NUM_LEAVES // HOSTS] * HOSTS
    return {
        "kind": "run",
        "shares": shares,
        "round": number,
        "num_leaves": NUM_LEAVES,
        "images_per_s": images / taken_s,
        "exposed": result.exposed_communication,
        "micro_batches_by_rank": balance["micro_batches_by_rank"] if balance else equal,
        "changes": balance["changes"] if balance else [],
        "state_sha256": result.state_sha256,
    }
