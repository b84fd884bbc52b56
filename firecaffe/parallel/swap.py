"""What the ranks of a row give each other between layers: each has something else for each.

Ranks of several hosts send messages. Ranks of one host write into memory that they share, where the
others read it.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from firecaffe.cluster.group import Group
from firecaffe.cluster.world import waiting
from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.schedule import ALL_TO_ALL
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
