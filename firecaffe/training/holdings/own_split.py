"""One weird trick: ranks that hold parts of layers, and compute their own samples.

The ranks of a row wait for each other at each split layer, in forward and backward. So each rank
computes one micro-batch at a time, and all compute equally many. If a rank's micro-batch is empty
and another rank's is not, it computes a stand-in and discards the results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from firecaffe.cluster.group import Group
from firecaffe.data import Batch, num_samples
from firecaffe.data.dataset import map_batch
from firecaffe.exchange.leaves import Shares
from firecaffe.parallel.own_samples import Gradients
from firecaffe.recipe.run import Run
from firecaffe.recipe.worker_numbers import rows_of
from firecaffe.training.evaluation import EvalBatch
from firecaffe.training.forward import Forward, match_format
from firecaffe.training.holdings.holding import Ready
from firecaffe.training.holdings.split_layers import SplitLayers
from firecaffe.training.outcome import FetchBatch
from firecaffe.training.parallel.split_network import SplitNetwork
from firecaffe.training.updates.part_sums import PartCodec, PartSums

STAND_IN_SAMPLES = 2
"""The number of samples in a stand-in. Batch normalization refuses a single sample."""


def stand_in_of(first: Batch) -> Batch:
    """Return a few real samples for a rank without any; invented ones may not suit the network."""
    return map_batch(lambda tensor: tensor[:STAND_IN_SAMPLES].clone(), first)


class OwnSplit(SplitLayers):
    def __init__(
        self,
        forward: Forward,
        network: nn.Module,
        split: SplitNetwork,
        run: Run,
        stand_in: Batch,
        codec: Callable[[Mapping[str, nn.Parameter]], PartCodec] | None,
    ) -> None:
        """Hold a row's parts of layers. `codec` makes the encoder of the parts' gradients."""
        super().__init__(forward, network, split)
        mesh, row = split.mesh, split.own_samples
        assert row is not None
        size, self._row, self._order = mesh.row.world_size, row, run.order
        first = mesh.world.rank // size * size
        self._leaves = [run.micro_batches(rank) for rank in range(first, first + size)]
        self._stand_in, self._stand_in_samples = stand_in, num_samples(*stand_in)
        self.evaluators: Group = mesh.world
        parts = {n: p for n, p in self.named.items() if p in split.parameters}
        coded = None if codec is None or not parts else codec(parts)
        self._sums = PartSums(parts, mesh.column, size, run.shares, coded)

    @property
    def summed(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.named.items() if n not in self._sums.names}

    @property
    def part_sums(self) -> Sequence[PartSums]:
        return [self._sums]

    def run(self, step: int, leaves: Sequence[int], fetch: FetchBatch) -> Iterator[Ready]:
        for number, leaf in enumerate(leaves):
            batch = fetch(leaf)
            of_row = [of_rank[number] for of_rank in self._leaves]
            samples = [self._order.samples_in_leaf(step, row_leaf) for row_leaf in of_row]
            with self._row.apart(self._filled(samples)) as gradients:
                if any(samples) and not samples[self._row.group.rank]:
                    self.forward.run_stand_in(*self._stand_in, step, leaf)
                yield Ready(
                    leaf, *self.forward(*batch, step, leaf), _parts(of_row, samples, gradients)
                )

    def set_shares(self, shares: Shares, order: Callable[[range], list[int]]) -> None:
        size = self._row.group.world_size
        row = rows_of(shares, size)[self.evaluators.rank // size]
        self._leaves = [order(share) for share in row]

    def outputs(
        self, batches: Iterator[EvalBatch], numbers: Sequence[int], num_samples: int
    ) -> Iterator[tuple[EvalBatch, Any]]:
        config, rank = self.forward.config, self._row.group.rank
        first = self.evaluators.rank - rank
        for number in range(first, num_samples, self.evaluators.world_size):
            starts = (
                (number + other) * config.eval_batch_size
                for other in range(self._row.group.world_size)
            )
            samples = [max(0, min(config.eval_batch_size, num_samples - start)) for start in starts]
            if not any(samples):
                return
            with self._row.apart(self._filled(samples)):
                batch = next(batches) if samples[rank] else None
                inputs = self._stand_in[0] if batch is None else batch[1]
                outputs = self.forward.model(match_format(inputs, config))
            if batch is not None:
                yield batch, outputs

    def _filled(self, samples: Sequence[int]) -> list[int]:
        return [sample or self._stand_in_samples for sample in samples]


def _parts(
    leaves: Sequence[int], samples: Sequence[int], gradients: Sequence[Gradients]
) -> list[tuple[int, Gradients]]:
    of_row = zip(leaves, samples, gradients, strict=True)
    return [(leaf, of_leaf if there else {}) for leaf, there, of_leaf in of_row]
