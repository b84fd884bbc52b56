"""A plug-in by which two trainings take turns, step by step: one computes while the other waits.

A machine that others use is fast in one second and slow in the next. Both trainings have the same
seconds so, and the ratio of their steps scatters much less than that of whole runs. The wait for
the turn is a part of the time that a step waits for data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from firecaffe.training.plugins import Plugin

if TYPE_CHECKING:  # Earlier commits, which are timed too, have these elsewhere.
    from firecaffe.cluster.world import World
    from firecaffe.data import Batch, SampleOrder
    from firecaffe.data.batches import TrainBatches

FOLDER, SIDE = "TURNS_FOLDER", "TURNS_SIDE"
"""Variables: where the pipes are; 0 for the training that begins, 1 for the other."""


def pipe(folder: Path, side: int, rank: int) -> Path:
    """Return the pipe from which this rank of a side takes its turns, a byte each."""
    return folder / f"{side}-{rank}"


@dataclass
class InTurn:
    """Batches of which the first of each step comes when it is this side's turn."""

    batches: TrainBatches
    own: int
    other: int
    is_first: bool
    last: int = field(default=-1, init=False)

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def train_batch(self, step: int, leaf: int) -> Batch:
        if step != self.last:
            if self.last >= 0:
                os.write(self.other, b"t")
            if self.last >= 0 or not self.is_first:
                os.read(self.own, 1)
            self.last = step
        return self.batches.train_batch(step, leaf)


class Turns(Plugin):
    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        folder, side = Path(os.environ[FOLDER]), int(os.environ[SIDE])
        # For both ways: so nobody has to be there yet.
        own, other = (os.open(pipe(folder, s, world.rank), os.O_RDWR) for s in (side, 1 - side))
        return InTurn(batches, own, other, is_first=side == 0)


def plugin() -> Turns:
    return Turns()
