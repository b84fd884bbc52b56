"""A plug-in by which some micro-batches take five times as long: their samples come later.

Which ones is a function of the micro-batch, so in every mode they are as many. TENTH: in each tenth
step one, in another place each time; where each worker has one micro-batch of a step, another
worker is late each time. EACH: a tenth of all, at random, so that several of a step may be.
"""

import random
import time
from dataclasses import dataclass

from firecaffe.cluster.world import World
from firecaffe.data import Batch, SampleOrder
from firecaffe.data.batches import TrainBatches
from firecaffe.training.plugins import Plugin

NONE, TENTH, EACH = "none", "tenth", "each"

TIMES = 5
"""As long."""


@dataclass
class Delay:
    """What is delayed, by how much; it may be changed between trainings."""

    kind: str = NONE
    micro_batch_s: float = 0.0
    """What one takes without delay."""

    def seconds(self, step: int, place: int, places: int) -> float:
        """Of a micro-batch. places: micro-batches of a step."""
        if self.kind == TENTH:
            is_late = step % 10 == 5 and place == step // 10 % places
        else:
            is_late = self.kind == EACH and random.Random(f"{step} {place}").random() < 0.1
        return (TIMES - 1) * self.micro_batch_s if is_late else 0.0


DELAY = Delay()


@dataclass
class Late:
    """Batches that are late."""

    batches: TrainBatches

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> Batch:
        time.sleep(DELAY.seconds(step, leaf, self.order.num_micro_batches))
        return self.batches.train_batch(step, leaf)


class Stragglers(Plugin):
    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        return Late(batches)


def plugin() -> Stragglers:
    return Stragglers()
