"""Evaluation by ranks of a row that each have batches of their own: by one weird trick.

They wait for each other at each split layer. So each evaluates a batch at a time, equally often:
whose batches are at their end computes a stand-in, of which nothing is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from firecaffe.cluster.group import Group
from firecaffe.data import Batch, num_samples
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.recipe.config import TrainConfig
from firecaffe.training.evaluate import EvalBatch
from firecaffe.training.forward import laid_out


@dataclass(frozen=True)
class OwnOutputs:
    """The outputs of this rank's batches; see `training.evaluate.Outputs`."""

    model: nn.Module
    config: TrainConfig
    world: Group
    """The ranks that share out the batches."""
    row: OwnSamples
    stand_in: Batch
    num_samples: int
    """Of the data set."""

    def __call__(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int]
    ) -> Iterator[tuple[EvalBatch, Any]]:
        world, row = self.world.world_size, self.row.group
        first = self.world.rank - row.rank
        for number in range(first, self.num_samples, world):
            samples = [self._samples_of(number + rank) for rank in range(row.world_size)]
            if not any(samples):
                return
            stands_in = num_samples(*self.stand_in)
            self.row.begin([each or stands_in for each in samples])
            try:
                batch = next(batches) if samples[row.rank] else None
                inputs = self.stand_in[0] if batch is None else batch[1]
                outputs = self.model(laid_out(inputs, self.config))
            finally:
                self.row.take_gradients()  # there are none
            if batch is not None:
                yield batch, outputs

    def _samples_of(self, number: int) -> int:
        size = self.config.eval_batch_size
        return max(0, min(size, self.num_samples - number * size))
