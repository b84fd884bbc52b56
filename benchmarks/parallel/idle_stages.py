"""For how long are the stages of a pipeline idle, against the published share?

    python -m benchmarks.parallel.idle_stages > benchmarks/results/idle_stages.md

Each stage is a layer that computes by sleeping, as a device would that leaves the CPU alone: so all
stages are equally fast, on any machine. A stage says for how long it waited for others; what it did
not compute of a step's time is the control.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.exchange.overlap import BACKWARD_S, FORWARD_S, SleepingLayer
from firecaffe.cluster.world import join
from firecaffe.parallel.stage_run import StageRunner
from firecaffe.parallel.stages import ORDERS, cut_stages, idle_share
from tests.world import Ranks

STAGES, MICRO_BATCHES, STEPS = (2, 4), (1, 2, 4, 8, 16), 4
"""The first step is not counted."""

HEAD = """# Idle stages

    python -m benchmarks.parallel.idle_stages

Each stage is a layer that sleeps {forward:g} s forward and {backward:g} s backward for each
micro-batch, on a rank of its own, all on one host. *Formula*: (K - 1) / (m + K - 1) with K stages
and m micro-batches. *Said*: the share of a step for which stages say that they waited for others.
*Not computed*: the share for which they did not sleep. Means over stages, medians of {steps} steps.

| stages | micro-batches | formula | order | said | not computed |
|---|---|---|---|---|---|"""


class Idle(NamedTuple):
    """Shares of a step."""

    said: float
    not_computed: float


class Zeros:
    """Micro-batches of which only the number counts."""

    def inputs(self, leaf: int) -> Tensor:
        return torch.zeros(2, 4, requires_grad=True)

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        total: Tensor = outputs.sum()
        return total

    def end(self, leaf: int) -> None:
        pass


def steps_of_rank(num_stages: int, order: str, num_micro_batches: int) -> list[Idle]:
    """The steps of this rank's stage."""
    found = []
    with join("cpu") as world:
        network = nn.Sequential(*[SleepingLayer() for _ in range(num_stages)])
        stage = cut_stages(network, [str(k) for k in range(1, num_stages)])[world.rank]
        computed_s = num_micro_batches * (FORWARD_S + BACKWARD_S)
        with StageRunner(stage, world, order) as runner:
            start_s = time.perf_counter()
            for _ in range(STEPS):
                for ready in runner.run(range(num_micro_batches), Zeros()):
                    assert ready.root is not None
                    torch.autograd.backward(ready.root)
                end_s = time.perf_counter()
                step_s, start_s = end_s - start_s, end_s
                found.append(Idle(runner.waited_s / step_s, 1 - computed_s / step_s))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.parse_args()
    print(HEAD.format(forward=FORWARD_S, backward=BACKWARD_S, steps=STEPS - 1), flush=True)
    ranks = Ranks()
    for num_stages in STAGES:
        for number in MICRO_BATCHES:
            for order in ORDERS:
                by_rank = ranks.shared(num_stages, steps_of_rank, num_stages, order, number)
                said, not_computed = (
                    statistics.median(
                        statistics.mean(step[column] for step in steps)
                        for steps in zip(*by_rank, strict=True)
                    )
                    for column in range(2)
                )
                formula = float(idle_share(num_stages, number))
                print(
                    f"| {num_stages} | {number} | {formula:.3f} | {order} | {said:.3f} | "
                    f"{not_computed:.3f} |",
                    flush=True,
                )
    ranks.close()


if __name__ == "__main__":
    main()
