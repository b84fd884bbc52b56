"""One weird trick: ranks that hold a layer in parts, each with its own samples.

Each rank computes layers that are not split for its own micro-batch. At a split layer, it has its
parts of the tensors of all ranks' micro-batches:

| exchange | with the same samples | with samples of their own |
|---|---|---|
| a whole tensor goes to all parts | nothing is sent | each gathers the samples of all |
| the sum over parts | all have it | each has that of its samples |
| parts are put together | all gather all parts | each gets all parts of its samples |
| a whole tensor is cut | each takes its parts | each gets its parts of all samples |

Each micro-batch, with its gradients of the weights, is computed separately, in the same parts. So
the bits are those of ranks that train the same samples. Ranks of several hosts send messages; ranks
of one host share memory. Source: Krizhevsky 2014 (arXiv 1404.5997), scheme (a).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import waiting
from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.fold import inputs_of
from firecaffe.exchange.leaves import sum_of_nodes
from firecaffe.exchange.schedule import ALL_TO_ALL
from firecaffe.parallel.cut import Cut
from firecaffe.parallel.flow import PartGroup
from firecaffe.transport.local_ranks import LocalRanks
from firecaffe.transport.run_schedule import Collectives

ALIGNMENT_BYTES = 64


class Swap:
    """An exchange of a tensor from each rank to each other, in one order; here, of one rank."""

    seconds = 0.0

    def __call__(
        self, given: Sequence[Tensor], shapes: Sequence[torch.Size], most: int
    ) -> list[Tensor]:
        """Return each rank's tensor, up to `most` elements, for this one; valid for two swaps."""
        return list(given)


class SwapByMessages(Swap):
    """A swap by messages, an all-to-all. All messages are as long as the longest."""

    def __init__(self, group: Group) -> None:
        self._group, self._collectives = group, Collectives(group)

    def __call__(
        self, given: Sequence[Tensor], shapes: Sequence[torch.Size], most: int
    ) -> list[Tensor]:
        rank, size = self._group.rank, self._group.world_size
        vector = given[0].new_empty(size * size * most)
        blocks = vector.view(size, size, most)
        for other, tensor in enumerate(given):
            if other != rank:
                _head(blocks[rank, other], tensor.shape).copy_(tensor)
        make = partial(find_collective(ALL_TO_ALL, "direct"), size)
        self._collectives.run(ALL_TO_ALL, make, vector)
        self.seconds = self._collectives.seconds
        return [
            given[rank] if other == rank else _head(blocks[other, rank], shape)
            for other, shape in enumerate(shapes)
        ]


class Memory(Swap):
    """A swap through shared memory, with two alternating boxes per rank, and a barrier."""

    def __init__(self, local: LocalRanks) -> None:
        self._local = local
        self._boxes: list[list[Tensor]] = []

    def __call__(
        self, given: Sequence[Tensor], shapes: Sequence[torch.Size], most: int
    ) -> list[Tensor]:
        begun_s = time.perf_counter()
        local_rank, dtype = self._local.own, given[0].dtype
        room = -(-most * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        boxes = [box[: room * len(given)].view(len(given), room) for box in self._next(room)]
        for other, tensor in enumerate(given):
            if other != local_rank:
                _head(boxes[local_rank][other].view(dtype), tensor.shape).copy_(tensor)
        # The barrier shows that everybody has read the box that is written next.
        with waiting(self._local.world):
            self._local.barrier()
        self.seconds += time.perf_counter() - begun_s
        return [
            given[local_rank]
            if other == local_rank
            else _head(boxes[other][local_rank].view(dtype), shape)
            for other, shape in enumerate(shapes)
        ]

    def _next(self, room: int) -> list[Tensor]:
        needed = room * self._local.size
        if not self._boxes or len(self._boxes[0][0]) < needed:
            self._boxes = [self._local.share(needed, torch.uint8) for _ in range(2)]
        self._boxes.reverse()
        return self._boxes[0]


def _head(vector: Tensor, shape: torch.Size) -> Tensor:
    return vector[: shape.numel()].view(shape)


Gradients = dict[nn.Parameter, Tensor]


class OwnSamples(PartGroup):
    """Ranks that hold one model in parts; a tensor's parts are in order of micro-batch and part."""

    def __init__(self, group: Group, num_parts: int, local: LocalRanks | None = None) -> None:
        super().__init__(group, num_parts)
        self._swap = Swap()
        if group.exchange_group is not None:
            self._swap = SwapByMessages(group) if local is None else Memory(local)
        self._nodes_of = inputs_of(num_parts, self.shares)
        self._samples: Sequence[int] = ()
        self._is_shared = True
        self._kept: list[Gradients] = []

    @contextmanager
    def apart(self, samples: Sequence[int]) -> Iterator[list[Gradients]]:
        """Give each rank its own micro-batch in a `with` block; elsewhere, all have the same one.

        `samples` are their sizes. Backward fills the yielded gradients, one dict per micro-batch.
        """
        self._samples, self._is_shared = samples, False
        self._kept = [{} for _ in samples]
        try:
            yield self._kept
        finally:
            self._is_shared, self._kept = True, []

    @property
    def seconds(self) -> float:
        return super().seconds + self._swap.seconds

    @property
    def first_own(self) -> int:
        return 0 if self._is_shared else self.group.rank * len(self.own)

    def copies(self, whole: Tensor) -> list[Tensor]:
        if self._is_shared:
            return super().copies(whole)
        contiguous, sample = whole.contiguous(), whole.shape[1:]
        shapes = [torch.Size((samples, *sample)) for samples in self._samples]
        most = max(self._samples) * sample.numel()
        every = self._swap([contiguous] * len(shapes), shapes, most)
        # Copies, because alignment may change bits.
        every = [part if part is contiguous else part.clone() for part in every]
        return [part.view_as(part) for part in every for _ in self.own]

    def sum(self, own: Sequence[Tensor]) -> Tensor:
        if self._is_shared:
            return super().sum(own)
        given = [torch.stack(self._nodes(of_rank)) for of_rank in self._by_rank(own)]
        sample = given[0].shape[2:]
        mine = self._samples[self.group.rank]
        shapes = [torch.Size((len(nodes), mine, *sample)) for nodes in self._nodes_of]
        most = max(map(len, self._nodes_of)) * max(self._samples) * sample.numel()
        values: list[Tensor] = [
            node for stacked in self._swap(given, shapes, most) for node in stacked
        ]
        all_nodes = [node for nodes in self._nodes_of for node in nodes]
        total: Tensor = sum_of_nodes(all_nodes, values, self.num_parts, _add)
        return total

    def sum_own(self, own: Sequence[Tensor], cut: Cut, dim: int) -> list[Tensor]:
        if self._is_shared:
            return super().sum_own(own, cut, dim)
        return self.slice(self.sum(own), cut, dim)

    def gather(self, own: Sequence[Tensor], cut: Cut, dim: int) -> Tensor:
        if self._is_shared:
            return super().gather(own, cut, dim)
        given = [torch.cat(list(of_rank), dim) for of_rank in self._by_rank(own)]
        shapes = self._shapes(given[self.group.rank], cut, dim)
        return torch.cat(self._swap(given, shapes, self._most(given[0], cut, dim)), dim)

    def slice(self, whole: Tensor, cut: Cut, dim: int) -> list[Tensor]:
        if self._is_shared:
            return super().slice(whole, cut, dim)
        given = [
            whole.narrow(dim, cut[share.start], cut[share.stop] - cut[share.start])
            for share in self.shares
        ]
        local_shape = given[self.group.rank].shape
        shapes = [torch.Size((samples, *local_shape[1:])) for samples in self._samples]
        every = self._swap(given, shapes, self._most(whole, cut, dim))
        return [part for received in every for part in self._divide(received, cut, dim)]

    def call(self, part: nn.Module, number: int, *inputs: Any) -> Tensor:
        if self._is_shared or not torch.is_grad_enabled():
            return super().call(part, number, *inputs)
        place = number // len(self.own)
        weights = {
            name: _Apart.apply(self._kept[place], parameter)  # type: ignore[no-untyped-call]
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        made: Tensor = functional_call(part, weights, inputs)
        return made

    def _by_rank(self, parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        count = len(self.own)
        return [parts[start : start + count] for start in range(0, len(parts), count)]

    def _most(self, example: Tensor, cut: Cut, dim: int) -> int:
        # The most elements that one rank has for another, of a tensor that is cut.
        longest = max(cut[share.stop] - cut[share.start] for share in self.shares)
        sample = example.numel() // (example.shape[0] * example.shape[dim])
        return max(self._samples) * sample * longest


def _add(left: Tensor, right: Tensor) -> Tensor:
    # Not in place: others write into the memory of the addends.
    return left + right


class _Apart(Function):
    # A parameter whose gradient of one micro-batch is stored separately.
    @staticmethod
    def forward(ctx: Any, kept: Gradients, parameter: nn.Parameter) -> Tensor:
        ctx.kept, ctx.parameter = kept, parameter
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        before = ctx.kept.get(ctx.parameter)
        ctx.kept[ctx.parameter] = gradient if before is None else before + gradient
        return None, None
