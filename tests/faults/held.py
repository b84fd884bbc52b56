"""A plug-in that holds every rank that has it before a step until a file is there."""

import os
import time
from pathlib import Path

from firecaffe.cluster.world import World
from firecaffe.data.batches import TrainBatches
from firecaffe.training.plugins import Plugin
from tests.kit.training import before_each

STEP, FILE = "HELD_STEP", "HELD_FILE"
"""Environment variables: the step, counted from 1, and the file."""


def plugin() -> "Held":
    return Held()


class Held(Plugin):
    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        return before_each(batches, hold)


def hold(step: int, _: int) -> None:
    while step + 1 >= int(os.environ[STEP]) and not Path(os.environ[FILE]).exists():
        time.sleep(0.01)
