"""Ranks that hold a model together, each with parts of its layers.

Each rank computes parts or a stage that no other rank computes. So ranks may have no common result
to compare, and a different kind of processor would go unnoticed. Therefore all ranks also compute
`reference_gradients`.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.data import Batches
from firecaffe.gradients.codec_memory import CodecMemory
from firecaffe.inventory.findings import Inventory
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.modes.replicas import NamesOfReplicas
from firecaffe.training.outcome import Spent
from firecaffe.training.parallel.cut_pieces import Names, NumbersInParts, NumbersOfRow, PieceInParts
from firecaffe.training.parallel.split_network import RowNetwork, SplitNetwork
from firecaffe.training.piece import GatheredWholes, Numbers, Piece, Wholes
from firecaffe.training.updates.part_sums import MemoryInParts
from firecaffe.training.updates.spread import Among, Spread, TensorPart

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
        self.held = held

    def examine(self, look: FirstLook, batches: Batches) -> Inventory | None:
        look.of_parts(self.held.mesh.world)
        return None

    def reference(self) -> Mapping[str, Tensor]:
        return reference_gradients(self.forward)

    def spread(self) -> Spread:
        return self.spread_over([self.held.mesh.row], self.named)

    def spread_over(self, groups: Sequence[Group], updated: Mapping[str, nn.Parameter]) -> Spread:
        # In the order in which the gradients are summed.
        names = [*self.summed, *(name for name in self.named if name not in self.summed)]
        return Among(
            groups,
            {name: parameter.dtype for name, parameter in self._trained_outline.items()},
            {name: self._part(name) for name in names},
            updated,
            self.knows_loss,
        )

    def wholes(self) -> Wholes:
        mesh = self.held.mesh
        sharers = mesh.stage if self.split_layers else None
        return GatheredWholes(mesh.world, sharers, self.piece, self.whole_name)

    @property
    def names(self) -> Names:
        return self.held.names

    def take_first_weights(self) -> list[int]:
        """Return the ranks whose weights differed; these were replaced when parts were drawn."""
        return self.held.replaced_ranks

    def pieces(self) -> dict[str, Piece]:
        pieces = super().pieces()
        in_parts = pieces if self.held.has_buffers else {"parameter": pieces["parameter"]}
        return pieces | {name: self.piece(piece) for name, piece in in_parts.items()}

    def piece(self, piece: Piece) -> Piece:
        return PieceInParts(piece, self.held.names)

    def piece_of_replicas(self, piece: Piece) -> Piece:
        return PieceInParts(piece, NamesOfReplicas(self.held.names))

    def memory(self, memory: CodecMemory) -> Piece:
        coded = [part_sum.codec for part_sum in self.part_sums if part_sum.codec is not None]
        memories: list[tuple[Container[str], CodecMemory]] = [(self.summed, memory)]
        memories += [(codec.names, codec.memory) for codec in coded]
        return MemoryInParts(memories, self.held.names)

    @property
    def outline(self) -> Mapping[str, nn.Parameter]:
        return self.held.outline

    def numbers(self, numbers: Numbers) -> Numbers:
        return NumbersInParts(numbers, self.held.names)

    def gathered_numbers(self, numbers: Numbers) -> Numbers:
        return NumbersOfRow(numbers, self.held.names, self.held.mesh.row)

    def whole_name(self, name: str) -> str:
        return self.held.names.source(name)[0].whole

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: parameter.numel() for name, parameter in self._trained_outline.items()}

    @property
    def _trained_outline(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.held.outline.items() if p.requires_grad}

    def _part(self, name: str) -> TensorPart:
        source, _ = self.held.names.source(name)
        if not source.cut:
            return TensorPart(source.whole)
        return TensorPart(source.whole, source.part, len(source.cut) - 1)


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
