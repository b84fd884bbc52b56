"""Ranks that hold a model together, each with parts of its layers.

Each rank computes parts or a stage that no other rank computes. So ranks may have no common result
to compare, and a different kind of processor would go unnoticed. Therefore all ranks also compute
`reference_gradients`.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.data import Batches
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.replicas import NamesOfReplicas
from firecaffe.training.outcome import Spent
from firecaffe.training.parallel.cut_pieces import (
    GatheredWholes,
    NumbersInParts,
    NumbersOfRow,
    PieceInParts,
)
from firecaffe.training.parallel.split_network import RowNetwork, SplitNetwork
from firecaffe.training.piece import Numbers, Piece, Wholes
from firecaffe.training.updates.part_sums import MemoryInParts
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
