"""A plug-in that holds ranks before a step until a file is there."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.world import World
from firecaffe.data import Batch, SampleOrder
from firecaffe.data.batches import TrainBatches
from firecaffe.training.plugins import Plugin

STEP, FILE = "HELD_STEP", "HELD_FILE"
"""Environment variables: the step, counted from 1, and the file."""


def plugin() -> "Held":
    return Held()


@dataclass(frozen=True)
class HeldBatches:
    """Batches that come when the file is there."""

    batches: TrainBatches

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> Batch:
        while step + 1 >= int(os.environ[STEP]) and not Path(os.environ[FILE]).exists():
            time.sleep(0.01)
        return self.batches.train_batch(step, leaf)


class Held(Plugin):
    """Holds every rank that has it."""

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        return HeldBatches(batches)
