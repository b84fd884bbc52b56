"""Ranks that hold a model together, each with parts of its layers.

Each rank computes parts or a stage that no other rank computes. So ranks may have no common result
to compare, and a different kind of processor would go unnoticed. Therefore all ranks also compute
`reference_gradients`.

With one weird trick, ranks that hold parts of layers compute their own samples. The ranks of a row
wait for each other at each split layer, in forward and backward. So each rank computes one
micro-batch at a time, and all compute equally many. If a rank's micro-batch is empty and another
rank's is not, it computes a stand-in and discards the results.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.data import Batch, Batches, num_samples
from firecaffe.data.dataset import map_batch
from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.bucket_sums import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.parallel.own_samples import Gradients
from firecaffe.recipe.run import Run
from firecaffe.recipe.worker_numbers import rows_of
from firecaffe.training.evaluation import EvalBatch
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward, match_format
from firecaffe.training.holdings.holding import Holding, Ready
from firecaffe.training.modes.replicas import NamesOfReplicas
from firecaffe.training.outcome import FetchBatch, Spent
from firecaffe.training.parallel.cut_pieces import (
    GatheredWholes,
    NumbersInParts,
    NumbersOfRow,
    PieceInParts,
)
from firecaffe.training.parallel.split_network import RowNetwork, SplitNetwork
from firecaffe.training.piece import Numbers, Piece, Wholes
from firecaffe.training.updates.part_sums import MemoryInParts, PartCodec, PartSums
from firecaffe.training.updates.spread import Spread

SAMPLES, CHANNELS, ROWS, CLASSES = 4, 16, 12, 10


def reference_gradients(forward: Forward) -> dict[str, Tensor]:
    """Return a small network's gradients by weight, which must have the same bits on all ranks.

    Weights and inputs are exact everywhere; the gradients are computed with training's arithmetic.
    """
    device = forward.device
    images = _numbers(SAMPLES, 3, ROWS, ROWS, device=device)
    filters = _numbers(CHANNELS, 3, 3, 3, device=device).requires_grad_()
    scale = _numbers(CHANNELS, device=device).requires_grad_()
    neurons = _numbers(CLASSES, CHANNELS * (ROWS // 2) ** 2, device=device).requires_grad_()
    with torch.enable_grad(), forward.arithmetic():
        x = F.conv2d(images, filters, padding=1)
        x = F.batch_norm(x, None, None, scale, training=True).relu()
        x = F.max_pool2d(x, 2).flatten(1)
        loss = F.cross_entropy(F.linear(x, neurons), torch.arange(SAMPLES, device=device))
    weights = {"filters": filters, "scale": scale, "neurons": neurons}
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return dict(zip(weights, gradients, strict=True))


def _numbers(*shape: int, device: torch.device) -> Tensor:
    # Numbers from -0.5 to 0.5 that use the full mantissa: integers divided by a prime.
    count = torch.Size(shape).numel()
    prime = 1009
    whole = torch.arange(count, device=device) * 7919 % prime
    return (whole / prime - 0.5).view(shape)


class RowHolding(Holding):
    """A holding whose tensors are parts of the whole network's tensors."""

    has_whole_gradients = False

    def __init__(self, forward: Forward, network: nn.Module, held: RowNetwork) -> None:
        super().__init__(forward, network, held.mesh.column)
        self.held, self.names, self.outline = held, held.names, held.outline

    def examine(self, look: FirstLook, batches: Batches) -> Inventory | None:
        look.of_parts(self.held.mesh.world)
        return None

    def reference(self) -> Mapping[str, Tensor]:
        return reference_gradients(self.forward)

    def spread(self) -> Spread:
        return self.spread_over([self.held.mesh.row], self.named)

    def wholes(self) -> Wholes:
        mesh = self.held.mesh
        sharers = mesh.stage if self.split_layers else None
        return GatheredWholes(mesh.world, sharers, self.names)

    def take_first_weights(self) -> list[int]:
        """Return the ranks whose weights differed; these were replaced when parts were drawn."""
        return self.held.replaced_ranks

    def pieces(self) -> dict[str, Piece]:
        pieces = super().pieces()
        in_parts = pieces if self.held.has_buffers else {"parameter": pieces["parameter"]}
        return pieces | {name: self.piece(piece) for name, piece in in_parts.items()}

    def piece(self, piece: Piece) -> Piece:
        return PieceInParts(piece, self.names)

    def piece_of_replicas(self, piece: Piece) -> Piece:
        return PieceInParts(piece, NamesOfReplicas(self.names))

    def memory(self, memory: CodecMemory) -> Piece:
        coded = [part_sum.codec for part_sum in self.part_sums if part_sum.codec is not None]
        memories: list[tuple[Container[str], CodecMemory]] = [(self.summed, memory)]
        memories += [(codec.names, codec.memory) for codec in coded]
        return MemoryInParts(memories, self.names)

    def numbers(self, numbers: Numbers) -> Numbers:
        return NumbersInParts(numbers, self.names)

    def gathered_numbers(self, numbers: Numbers) -> Numbers:
        return NumbersOfRow(numbers, self.names, self.held.mesh.row)


class SplitLayers(RowHolding):
    """Split layers exchange tensors by themselves, forward and backward."""

    def __init__(self, forward: Forward, network: nn.Module, split: SplitNetwork) -> None:
        super().__init__(forward, network, split)
        self.everywhere = {**self.named, **split.outlines}
        self._split = split

    def spent(self) -> Spent:
        return Spent(layers_s=self._split.group.seconds)

    @property
    def split_layers(self) -> Mapping[str, str] | None:
        return self._split.chosen

    def row(self, num_leaves: int) -> dict[str, Any] | None:
        return self._split.row


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
