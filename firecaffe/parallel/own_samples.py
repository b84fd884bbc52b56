"""One weird trick: ranks that hold a layer in parts, and each bring samples of their own.

What is not split is computed by each rank for its own micro-batch, as by data parallelism. At a
split layer each rank has its parts of the tensors of all ranks' micro-batches:

| exchange | with the same samples | with samples of their own |
|---|---|---|
| a whole tensor goes to all parts | nothing is sent | each gathers the samples of all |
| the sum over parts | all have it | each has that of its samples |
| parts are put together | all gather all parts | each gets all parts of its samples |
| a whole tensor is cut | each takes its parts | each gets its parts of all samples |

Micro-batches are never mixed: each is computed apart, in the same parts, and so are its gradients
of the weights. So the bits are those of ranks that all train the same samples.

Source: Krizhevsky 2014 (arXiv 1404.5997), scheme (a): all samples at once.

What the ranks of a row give each other between layers: each has something else for each.

Ranks of several hosts send messages. Ranks of one host write into memory that they share, where the
others read it.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

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
from firecaffe.parallel.parts import PartGroup
from firecaffe.transport.collectives import Collectives
from firecaffe.transport.local import LocalRanks

ALIGNMENT_BYTES = 64
"""At whose multiples tensors begin in shared memory."""


class Swap(Protocol):
    """A way to swap; all ranks call it, in the same order."""

    @property
    def seconds(self) -> float:
        """What swaps have taken so far."""

    def __call__(
        self, given: Sequence[Tensor], shapes: Sequence[torch.Size], most: int
    ) -> list[Tensor]:
        """What each rank has for this one, as it is until the next swap but one.

        given: what this rank has for each. shapes: of what it gets from each. most: the numbers of
        the largest that any rank has for any. Raises: PeerLostError.
        """


class Alone:
    """A row of one rank."""

    seconds = 0.0

    def __call__(
        self, given: Sequence[Tensor], shapes: Sequence[torch.Size], most: int
    ) -> list[Tensor]:
        return list(given)


class Messages:
    """By the schedule of an all-to-all; ranks send as much as the one with the most."""

    def __init__(self, group: Group) -> None:
        self._group, self._collectives = group, Collectives(group)

    @property
    def seconds(self) -> float:
        return self._collectives.seconds

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
        self._collectives.run(ALL_TO_ALL, make, vector, range(size))
        return [
            given[rank] if other == rank else _head(blocks[other, rank], shape)
            for other, shape in enumerate(shapes)
        ]


class Memory:
    """Each rank has two boxes, which take turns: who writes into one knows by the barrier between
    that everybody has read what was in it.
    """

    def __init__(self, local: LocalRanks) -> None:
        self._local = local
        self._boxes: list[list[Tensor]] = []
        self.seconds = 0.0

    def __call__(
        self, given: Sequence[Tensor], shapes: Sequence[torch.Size], most: int
    ) -> list[Tensor]:
        begun_s = time.perf_counter()
        own, dtype = self._local.own, given[0].dtype
        room = -(-most * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        boxes = [box[: room * len(given)].view(len(given), room) for box in self._next(room)]
        for other, tensor in enumerate(given):
            if other != own:
                _head(boxes[own][other].view(dtype), tensor.shape).copy_(tensor)
        with waiting(self._local.world):
            self._local.barrier()
        self.seconds += time.perf_counter() - begun_s
        return [
            given[own] if other == own else _head(boxes[other][own].view(dtype), shape)
            for other, shape in enumerate(shapes)
        ]

    def _next(self, room: int) -> list[Tensor]:
        """The box of each rank whose turn it is, with so many bytes for each rank."""
        needed = room * self._local.size
        if not self._boxes or len(self._boxes[0][0]) < needed:
            self._boxes = [self._local.share(needed, torch.uint8) for _ in range(2)]
        self._boxes.reverse()
        return self._boxes[0]


def _head(vector: Tensor, shape: torch.Size) -> Tensor:
    """The first numbers of a vector, in a shape."""
    return vector[: shape.numel()].view(shape)


Gradients = dict[nn.Parameter, Tensor]


class OwnSamples(PartGroup):
    """Ranks that hold one model in parts; its tensors in parts are rank 0's micro-batch's parts,
    then rank 1's, and so on.
    """

    def __init__(self, group: Group, num_parts: int, local: LocalRanks | None = None) -> None:
        """local: the ranks, if all are on one host and may share memory."""
        super().__init__(group, num_parts)
        self._swap: Swap = Alone()
        if group.exchange_group is not None:
            self._swap = Messages(group) if local is None else Memory(local)
        self._nodes_of = inputs_of(num_parts, self.shares)
        self._samples: Sequence[int] = ()
        self._is_shared = True
        self._kept: list[Gradients] = []

    @contextmanager
    def apart(self, samples: Sequence[int]) -> Iterator[list[Gradients]]:
        """A block in which each rank has a micro-batch of its own, forward and backward. Around it
        all ranks have the same samples, as in an evaluation.

        samples: of each rank's. Yields what backward fills with the gradients of this rank's parts,
        by the micro-batch of each rank.
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
        own, sample = whole.contiguous(), whole.shape[1:]
        shapes = [torch.Size((samples, *sample)) for samples in self._samples]
        most = max(self._samples) * sample.numel()
        every = self._swap([own] * len(shapes), shapes, most)
        # Memory of its own: how it is aligned may show in the bits.
        every = [each if each is own else each.clone() for each in every]
        return [each.view_as(each) for each in every for _ in self.own]

    def sum(self, own: Sequence[Tensor]) -> Tensor:
        if self._is_shared:
            return super().sum(own)
        given = [torch.stack(self._nodes(each)) for each in self._by_rank(own)]
        sample = given[0].shape[2:]
        mine = self._samples[self.group.rank]
        shapes = [torch.Size((len(nodes), mine, *sample)) for nodes in self._nodes_of]
        most = max(map(len, self._nodes_of)) * max(self._samples) * sample.numel()
        values: list[Tensor] = [node for each in self._swap(given, shapes, most) for node in each]
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
        given = [torch.cat(list(each), dim) for each in self._by_rank(own)]
        shapes = self._shapes(given[self.group.rank], cut, dim)
        return torch.cat(self._swap(given, shapes, self._most(given[0], cut, dim)), dim)

    def slice(self, whole: Tensor, cut: Cut, dim: int) -> list[Tensor]:
        if self._is_shared:
            return super().slice(whole, cut, dim)
        given = [
            whole.narrow(dim, cut[share.start], cut[share.stop] - cut[share.start])
            for share in self.shares
        ]
        own = given[self.group.rank].shape
        shapes = [torch.Size((samples, *own[1:])) for samples in self._samples]
        every = self._swap(given, shapes, self._most(whole, cut, dim))
        lengths = [cut[part + 1] - cut[part] for part in self.own]
        return [
            part.clone(memory_format=torch.contiguous_format)
            for each in every
            for part in torch.split(each, lengths, dim)
        ]

    def call(self, part: nn.Module, number: int, *inputs: Any) -> Tensor:
        if self._is_shared or not torch.is_grad_enabled():
            return super().call(part, number, *inputs)
        place = number // len(self.own)
        weights = {
            name: _Apart.apply(self._kept[place], each)  # type: ignore[no-untyped-call]
            for name, each in part.named_parameters()
            if each.requires_grad
        }
        made: Tensor = functional_call(part, weights, inputs)
        return made

    def _by_rank(self, own: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The parts of each rank's micro-batch."""
        count = len(self.own)
        return [own[start : start + count] for start in range(0, len(own), count)]

    def _most(self, example: Tensor, cut: Cut, dim: int) -> int:
        """The most numbers that one rank has for another of a tensor that is cut."""
        longest = max(cut[share.stop] - cut[share.start] for share in self.shares)
        sample = example.numel() // (example.shape[0] * example.shape[dim])
        return max(self._samples) * sample * longest


def _add(left: Tensor, right: Tensor) -> Tensor:
    """In memory of its own: where they are others will write."""
    return left + right


class _Apart(Function):
    """A parameter whose gradient by one micro-batch is kept by itself."""

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
