"""A plug-in that kills a rank before a step, once there is a checkpoint to go on from."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from firecaffe.cluster.world import World
from firecaffe.data import Batch, SampleOrder
from firecaffe.data.train_batches import TrainBatches
from firecaffe.training.plugins import Plugin

RANK, STEP, FOLDER = "KILLED_RANK", "KILLED_STEP", "KILLED_FOLDER"
"""Environment variables: the rank, the step, counted from 1, and the run's folder."""


def words(rank: int, step: int, folder: Path) -> dict[str, str]:
    """What the environment says of a kill."""
    return {RANK: str(rank), STEP: str(step), FOLDER: str(folder)}


def plugin() -> Plugin:
    return Kill()


class Kill(Plugin):
    """Kills the rank."""

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        return Deadly(batches) if world.rank == int(os.environ[RANK]) else batches


@dataclass(frozen=True)
class Deadly:
    """Batches of which one is never had."""

    batches: TrainBatches

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> Batch:
        if step + 1 >= int(os.environ[STEP]):
            checkpoints = Path(os.environ[FOLDER]) / "checkpoints"
            while not any(checkpoints.glob("step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.batches.train_batch(step, leaf)
