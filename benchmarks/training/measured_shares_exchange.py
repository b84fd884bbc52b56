"""The ranks of `measured_shares exchange`: what shares of any size cost on a network."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from benchmarks.kit import raw_lines
from benchmarks.kit.our_step import OurStep
from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World, join
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.exchange.leaves import Shares, equal_shares
from firecaffe.exchange.route import FOLD, find_route
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.recipe.sections import TrainConfig
from firecaffe.synchrony.shares import balanced_shares
from firecaffe.transport.exchange import Exchange

RATE = 200_000_000
NUM_LEAVES = 32
LAYERS, ELEMENTS = 6, 350_000
"""8.4 MB of gradients."""
BUCKET_BYTES = 1_400_000
COMPUTE_S = 1.2
"""Of each rank in a step; a third of it forward."""

SPEEDS = {
    "one at half speed": [1.0, 1.0, 1.0, 2.0],
    "one a little slower": [1.0, 1.0, 1.0, 1.3],
    "all different": [1.0, 1.4, 1.2, 2.2],
}
"""Seconds of a micro-batch on each rank, for which shares are found."""


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways; its weight's gradient is ready then."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        context.save_for_backward(weight)
        context.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(context.seconds * 2 / 3)
        return gradients[0], torch.ones_like(context.saved_tensors[0]), None


class SleepingLayer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return result


def rank_program(rounds: int, out: Path) -> None:
    """Steps of each variant in turns; rank 0 writes a row for each step."""
    torch.set_num_threads(1)
    with join("cpu") as world:
        equal = equal_shares(NUM_LEAVES, world.world_size)
        variants: dict[str, tuple[str, Shares, bool]] = {
            f"equal, {name}": (name, equal, False) for name in ("halving_doubling", "tree")
        }
        variants["equal, fold"] = ("tree", equal, True)
        for name, seconds in SPEEDS.items():
            shares = balanced_shares(NUM_LEAVES, seconds)
            sizes = ", ".join(str(len(share)) for share in shares)
            variants[f"{name} ({sizes}), fold"] = ("tree", shares, True)
        running = {name: make_step(world, *variant) for name, variant in variants.items()}
        for number in range(rounds + 1):
            for name, step in running.items():
                dist.barrier(group=world.group)
                before = world.traffic.sent_bytes
                result = step(number)
                sent = (world.traffic.sent_bytes or 0) - (before or 0)
                own = f"{result.timings.exposed_communication_s} {sent}"
                stated = [text.split() for text in gather_text(world, own)]
                if number and world.is_first:  # the first warms up
                    row = {
                        "kind": "step",
                        "variant": name,
                        "exposed_s": sum(float(each) for each, _ in stated) / len(stated),
                        "step_s": result.timings.step_s,
                        "sent_bytes": max(int(each) for _, each in stated),
                    }
                    raw_lines.append(out, row)
        for step in running.values():
            step.close()


def make_step(world: World, algorithm: str, shares: Shares, any_shares: bool) -> OurStep:
    """A step in which every rank computes for as long, whatever its share."""
    own = shares[world.rank]
    seconds = COMPUTE_S / len(own) / LAYERS
    model = nn.Sequential(nn.Flatten(), *[SleepingLayer(seconds) for _ in range(LAYERS)])
    config = TrainConfig(global_batch_size=NUM_LEAVES, micro_batch_size=1)
    dataset = TensorDataset(torch.zeros(64, 1, 1, 10), torch.zeros(64, dtype=torch.int64), 10)
    batches = Batches(dataset, SampleOrder(0, 64, NUM_LEAVES, 1), DataConfig())
    words = ExchangeConfig(algorithm=algorithm, bucket_bytes=BUCKET_BYTES)
    route = find_route(algorithm, NUM_LEAVES, world.world_size, any_shares=any_shares)
    exchange = Exchange(world, route)
    optimizer = optim.SGD(model.parameters(), 0.0)
    step = OurStep(model, _loss, batches, config, optimizer, words, exchange)
    if route.way == FOLD:
        step.reducer.set_shares(shares)
        step.stepper.leaves = route.order(NUM_LEAVES, own)
    return step


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels)
