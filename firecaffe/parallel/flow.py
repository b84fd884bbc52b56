"""The parts that a rank holds, and what ranks exchange, each with its conjugate as its gradient.

The bits of a matrix product depend on its shape. So what is split has a fixed number of parts, each
computed separately, on any number of ranks. Sums over parts are made by a tree, which continues
across ranks like the tree over micro-batches. So the number of ranks changes no bit.

| forward | backward |
|---|---|
| `copy`: a whole tensor goes to all parts | the sum over parts of its gradients |
| `add`: the sum over parts is whole | its gradient goes to all parts |
| `gather`: parts are put together | each rank takes its parts of the gradient |
| `copy_gathered`: parts that were put together go to all parts | the sum, each rank's parts of it |
| `slice_own`: each rank takes its parts | the parts of the gradient are put together |

A whole tensor is equal on all ranks, and so is its gradient. With one weird trick, each rank has
the whole tensor of its own samples, and its parts of all samples (`parallel.own_samples`).
Source: Shoeybi et al. 2019 (Megatron-LM), section 3, for the conjugate pairs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.cluster.group import Group
from firecaffe.exchange.collectives import find_collective
from firecaffe.exchange.fold import inputs_of
from firecaffe.exchange.leaves import Node, TreeSum, equal_shares
from firecaffe.exchange.schedule import ALL_GATHER
from firecaffe.parallel.cut import Cut
from firecaffe.transport.fold_nodes import NodeSum
from firecaffe.transport.run_schedule import Collectives


class PartGroup:
    """Ranks that hold one model in parts. All must call the same exchanges, in the same order."""

    def __init__(self, group: Group, num_parts: int) -> None:
        """Make the group. Raises: ValueError if the ranks cannot hold equal numbers of parts."""
        if num_parts % group.world_size:
            raise ValueError(f"{group.world_size} ranks cannot hold {num_parts} parts equally")
        self.group = group
        self.num_parts = num_parts
        self.shares = equal_shares(num_parts, group.world_size)
        self._sum = NodeSum(group, inputs_of(num_parts, self.shares), num_parts)
        self.collectives = Collectives(group)

    @property
    def own(self) -> range:
        return self.shares[self.group.rank]

    @property
    def first_own(self) -> int:
        """The place of the first part of this rank's own samples, among its parts of a tensor."""
        return 0

    @property
    def seconds(self) -> float:
        return self.collectives.seconds + self._sum.seconds

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # The same ranks hold a copy of a network.
        return self

    def copies(self, whole: Tensor) -> list[Tensor]:
        """Return a tensor per part of this rank, contiguous because strides may change bits."""
        whole = whole.contiguous()
        return [whole.view_as(whole) for _ in self.own]

    def sum(self, own: Sequence[Tensor]) -> Tensor:
        """Return the sum over all parts, by the tree, on all ranks; `own` is not changed."""
        nodes = [node.reshape(-1) for node in self._nodes(own)]
        return self._sum(nodes).view(own[0].shape)

    def sum_own(self, own: Sequence[Tensor], cut: Cut, dim: int) -> list[Tensor]:
        """Return this rank's parts of `sum`, at half of its cost. Raises: PeerLostError."""
        nodes = self._nodes(own)
        if self.group.exchange_group is None:
            return self.slice(nodes[0], cut, dim)
        shapes = self._shapes(own[0], cut, dim)
        most = max(shape.numel() for shape in shapes)  # all send as much as the largest
        vectors = []
        for node in nodes:
            rows = node.new_zeros(len(shapes), most)
            for row, share, shape in zip(rows, self.shares, shapes, strict=True):
                row[: shape.numel()].view(shape).copy_(
                    node.narrow(dim, cut[share.start], shape[dim])
                )
            vectors.append(rows.view(-1))
        shape = shapes[self.group.rank]
        return self._divide(self._sum.scattered(vectors)[: shape.numel()].view(shape), cut, dim)

    def gather(self, own: Sequence[Tensor], cut: Cut, dim: int) -> Tensor:
        """Return the whole tensor on all ranks, from parts of `dim`. Raises: PeerLostError."""
        if self.group.exchange_group is None:
            return torch.cat(list(own), dim)
        shapes = self._shapes(own[0], cut, dim)
        return torch.cat(self._all_gather(own, shapes, dim), dim)

    def _shapes(self, own: Tensor, cut: Cut, dim: int) -> list[torch.Size]:
        shape, shapes = list(own.shape), []
        for share in self.shares:
            shape[dim] = cut[share.stop] - cut[share.start]
            shapes.append(torch.Size(shape))
        return shapes

    def _all_gather(
        self, parts: Sequence[Tensor], shapes: Sequence[torch.Size], dim: int
    ) -> list[Tensor]:
        # Returns the tensors of all ranks as views of one vector. All send as much as the largest.
        most = max(shape.numel() for shape in shapes)
        size = self.group.world_size
        vector = parts[0].new_empty(size * most)
        places = [
            row[: shape.numel()].view(shape)
            for row, shape in zip(vector.view(size, most), shapes, strict=True)
        ]
        torch.cat(list(parts), dim, out=places[self.group.rank])
        make = partial(find_collective(ALL_GATHER, "sharded_parameter_server"), size)
        self.collectives.run(ALL_GATHER, make, vector)
        return places

    def call(self, part: nn.Module, number: int, *inputs: Any) -> Tensor:
        made: Tensor = part(*inputs)
        return made

    def _nodes(self, own: Sequence[Tensor]) -> list[Tensor]:
        # This rank's nodes of the tree over parts, as tensors that may be added to in place.
        counter: TreeSum[Tensor] = TreeSum(self.num_parts, torch.add)
        for part, addend in zip(self.own, own, strict=True):
            counter.push(Node(0, part), addend)
        # The addends must not change, so copy them.
        return [
            value.clone() if any(value is a for a in own) else value for _, value in counter.pending
        ]

    def slice(self, whole: Tensor, cut: Cut, dim: int) -> list[Tensor]:
        start, stop = cut[self.own.start], cut[self.own.stop]
        return self._divide(whole.narrow(dim, start, stop - start), cut, dim)

    def _divide(self, share: Tensor, cut: Cut, dim: int) -> list[Tensor]:
        # Divides this rank's share into its parts, copied because alignment may change bits.
        parts = torch.split(share, [cut[part + 1] - cut[part] for part in self.own], dim)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]


def copy(group: PartGroup, whole: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor for each of this rank's parts; it must not be changed in place."""
    return with_conjugate(group.copies, lambda *parts: [group.sum(parts)], whole)


def add(group: PartGroup, own: Sequence[Tensor]) -> Tensor:
    return with_conjugate(lambda *parts: [group.sum(parts)], group.copies, *own)[0]


def gather(group: PartGroup, own: Sequence[Tensor], cut: Cut, dim: int) -> Tensor:
    return with_conjugate(
        lambda *parts: [group.gather(parts, cut, dim)],
        lambda whole: group.slice(whole, cut, dim),
        *own,
    )[0]


def copy_gathered(
    group: PartGroup, gathered: Tensor, own: Sequence[Tensor], cut: Cut, dim: int
) -> tuple[Tensor, ...]:
    """Do `gather`, then `copy`, if no rank needs the whole sum. `gathered` is all ranks' `own`."""
    whole = gathered.detach()
    return with_conjugate(
        lambda *_: group.copies(whole), lambda *parts: group.sum_own(parts, cut, dim), *own
    )


def slice_own(group: PartGroup, whole: Tensor, cut: Cut, dim: int) -> tuple[Tensor, ...]:
    return with_conjugate(
        lambda x: group.slice(x, cut, dim), lambda *parts: [group.gather(parts, cut, dim)], whole
    )


Exchange = Callable[..., Sequence[Tensor]]
Gradient = Callable[..., Sequence[Tensor | None]]


def with_conjugate(forward: Exchange, backward: Gradient, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `forward` of tensors; `backward` maps the results' gradients to the tensors'."""
    made: tuple[Tensor, ...] = _Pair.apply(  # type: ignore[no-untyped-call]
        forward, backward, *tensors
    )
    return made


class _Pair(Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Exchange, backward: Gradient, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = backward
        return tuple(forward(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.exchange(*gradients)
