"""Is the overlap real? Exposed communication as reported, against steps without any exchange.

    python -m benchmarks.exchange.overlap [--hosts 4] [--rate 200mbit]      # needs root

Each host of an emulated cluster runs one rank. Its network computes by sleeping, as a device would
that leaves the CPU alone, so that nothing but communication can lengthen a step. Steps with and
without the exchange take turns; the difference of their times is what communication really cost,
and must be what the step reports as exposed.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate
from benchmarks.kit.our_step import OurStep
from firecaffe.cluster.world import World, join
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.recipe.sections import TrainConfig
from firecaffe.training.outcome import StepResult
from firecaffe.transport.exchange import Exchange

LAYERS, ELEMENTS = 6, 350_000
"""8.4 MB of gradients."""
BUCKET_BYTES = 1_400_000
FORWARD_S, BACKWARD_S = 0.04, 0.08
"""Of one layer."""
COLUMNS = ("exchange", "step s", "without", "difference", "reported exposed", "ratio", "exchange s")


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways; its weight's gradient is ready then."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(BACKWARD_S)
        return gradients[0], torch.ones_like(context.saved_tensors[0])


class SleepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result


class NoExchange(Exchange):
    """Every rank keeps its own sums."""

    def all_reduce(self, vector: Tensor, lane: int = 0, divide_by: int = 1) -> None:
        pass


def make_step(world: World, exchange: Exchange) -> OurStep:
    model = nn.Sequential(nn.Flatten(), *[SleepingLayer() for _ in range(LAYERS)])
    config = TrainConfig(global_batch_size=world.world_size, micro_batch_size=1)
    dataset = TensorDataset(torch.zeros(64, 1, 1, 10), torch.zeros(64, dtype=torch.int64), 10)
    batches = Batches(dataset, SampleOrder(0, 64, world.world_size, 1), DataConfig())
    words = ExchangeConfig(algorithm=exchange.route.algorithm, bucket_bytes=BUCKET_BYTES)
    return OurStep(
        model, _loss, batches, config, optim.SGD(model.parameters(), 0.0), words, exchange
    )


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def rank_program(algorithms: list[str], steps: int) -> None:
    torch.set_num_threads(1)
    with join("cpu") as world:
        for algorithm in algorithms:
            parts = {
                kind: make_step(world, kind.of_vectors(world, algorithm))
                for kind in (Exchange, NoExchange)
            }
            found: dict[type[Exchange], list[StepResult]] = {kind: [] for kind in parts}
            for step in range(steps + 1):
                for kind, run in parts.items():
                    torch.distributed.barrier(group=world.group)
                    result = run(step)
                    if step:
                        found[kind].append(result)
            for run in parts.values():
                run.close()
            if world.is_first:
                print(_row(algorithm, found[Exchange], found[NoExchange]), flush=True)


def _row(algorithm: str, with_it: list[StepResult], without: list[StepResult]) -> str:
    step_s, bare_s = (
        statistics.median(result.timings.step_s for result in results)
        for results in (with_it, without)
    )
    exposed_s = statistics.median(r.timings.exposed_communication_s for r in with_it)
    exchange_s = statistics.median(r.timings.exchange_s for r in with_it)
    cells = [step_s, bare_s, step_s - bare_s, exposed_s, exposed_s / (step_s - bare_s), exchange_s]
    return f"| {algorithm} | {' | '.join(f'{cell:.3f}' for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=parse_rate, default="200mbit")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--algorithms", nargs="+", default=["native", "ring", "halving_doubling", "tree"]
    )
    arguments = parser.parse_args()
    if arguments.rank:
        rank_program(arguments.algorithms, arguments.steps)
        return
    command = [sys.executable, "-m", "benchmarks.exchange.overlap", "--rank"]
    command += ["--steps", str(arguments.steps), "--algorithms", *arguments.algorithms]
    with VirtualCluster(arguments.hosts, arguments.rate) as cluster:
        print(f"{arguments.hosts} hosts; {cluster.conditions()}; n = {arguments.steps}\n")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        cluster.run(command, timeout_s=600.0, live=True)


if __name__ == "__main__":
    main()
