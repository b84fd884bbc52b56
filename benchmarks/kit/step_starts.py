"""A plug-in that notes when each step of a training asks for its first samples, on this rank."""

import time
from dataclasses import dataclass

from firecaffe.cluster.world import World
from firecaffe.data import Batch, SampleOrder
from firecaffe.data.batches import TrainBatches
from firecaffe.training.plugins import Plugin

STARTS: list[float] = []
"""Of the training under way, or the last one, by time.perf_counter."""


@dataclass
class Timed:
    """Batches that note it."""

    batches: TrainBatches
    last: int = -1

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> Batch:
        if step != self.last:
            self.last = step
            STARTS.append(time.perf_counter())
        return self.batches.train_batch(step, leaf)


class Starts(Plugin):
    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        STARTS.clear()
        return Timed(batches)


def plugin() -> Starts:
    return Starts()
