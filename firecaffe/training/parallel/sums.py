"""Sums of the gradients of layers whose parts see the micro-batches of all ranks of a row.

With one weird trick a rank has gradients of its parts by each micro-batch of its row. They are the
leaves of the same tree: each rank of the row stands for a share of them, and the tree goes on over
the column, whose ranks hold the same parts. A row that is all there is exchanges nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.exchange.leaves import Node, Shares, TreeSum, largest_nodes
from firecaffe.parallel.own_samples import Gradients
from firecaffe.transport.fold import NodeSum


class PartSums:
    """Sums over the micro-batches of a step: `begin`, `add` for each round of them, `finish`."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], column: Group, rows: Sequence[Shares]
    ) -> None:
        """named: the parts that are trained. rows: of each rank of the column, the micro-batches of
        the ranks of its row.
        """
        self.names = list(named)
        self._parameters = list(named.values())
        self._num_leaves = rows[-1][-1].stop
        self._own = rows[column.rank]
        nodes = [
            [node for share in row for node in largest_nodes(self._num_leaves, share)]
            for row in rows
        ]
        self._sum = NodeSum(column, nodes, self._num_leaves)

    @property
    def seconds(self) -> float:
        """What its exchanges on the host have taken so far."""
        return self._sum.seconds

    def begin(self) -> None:
        """Begins a step."""
        for each in self._parameters:
            each.grad = None
        self._counters: list[TreeSum[Tensor]] = [
            TreeSum(self._num_leaves, Tensor.add_) for _ in self._own
        ]

    def add(self, leaves: Sequence[int], of_ranks: Sequence[Gradients]) -> None:
        """Adds a micro-batch of each rank of the row, and takes its gradients out of `of_ranks`.
        leaves: their numbers.
        """
        for counter, leaf, gradients in zip(self._counters, leaves, of_ranks, strict=True):
            counter.push(Node(0, leaf), self._vector(gradients))
            gradients.clear()  # beside the vectors there is no room for all of them

    def finish(self, weight: float) -> None:
        """Leaves the mean in every `grad`; None if no micro-batch has used the parameter. weight:
        what the sum is divided by. Raises: PeerLostError.
        """
        pending = [each for counter in self._counters for each in counter.pending]
        self._counters = []
        in_order = sorted(pending, key=lambda each: each[0].index << each[0].level)
        vectors = [value for _, value in in_order]
        del pending, in_order
        mean, uses = self._sum(vectors).tensor_split([-len(self._parameters)])
        mean.div_(weight)
        place = 0
        for parameter, count in zip(self._parameters, uses.tolist(), strict=True):
            size = parameter.numel()
            parameter.grad = mean[place : place + size].view_as(parameter) if count else None
            place += size

    def finite(self) -> Tensor:
        """Whether each mean is finite: bool, shape (parameters,)."""
        zero = torch.zeros(1)
        norms = torch._foreach_norm(
            [zero if each.grad is None else each.grad for each in self._parameters], float("inf")
        )
        return torch.stack([norm.double() for norm in norms]).isfinite()

    def _vector(self, gradients: Gradients) -> Tensor:
        """The gradients of one micro-batch, then for each parameter whether it was used."""
        like = self._parameters[0]
        uses = like.new_tensor([float(each in gradients) for each in self._parameters])
        parts = [
            gradients[each].reshape(-1) if each in gradients else each.new_zeros(each.numel())
            for each in self._parameters
        ]
        return torch.cat([*parts, uses])
