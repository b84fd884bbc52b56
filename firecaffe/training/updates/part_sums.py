"""Sums of the gradients of layers whose parts see the micro-batches of all ranks of a row.

With one weird trick a rank has gradients of its parts by each micro-batch of its row. They are the
leaves of the same tree: each rank of the row stands for a share of them, and the tree goes on over
the column, whose ranks hold the same parts. A row that is all there is exchanges nothing.

These are most of a network's weights, so what counts is how often they go through memory: nothing
is copied, and the last additions, the division and the look for what is not finite are done block
by block, in the cache.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.exchange.leaves import Node, Shares, TreeSum, largest_nodes, sum_of_nodes
from firecaffe.parallel.own_samples import Gradients
from firecaffe.recipe.parallel import rows_of
from firecaffe.training.updates.part_codec import PartCodec
from firecaffe.transport.fold import NodeSum

BLOCK_ELEMENTS = 65_536
"""On a CPU: 256 kB of each node, some of which fit into its cache."""

Leaf = list[Tensor]
"""The gradients of one micro-batch, flat, then for each parameter whether it was used."""


class PartSums:
    """Sums over the micro-batches of a step: `begin`, `add` for each round of them, `finish`."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        column: Group,
        row_size: int,
        shares: Shares,
        codec: PartCodec | None = None,
    ) -> None:
        """named: the parts that are trained. shares: the micro-batches of all ranks, by rows of so
        many. codec: what encodes the gradients, if something does.
        """
        self.codec = codec
        self._level = None if codec is None else codec.level
        self.names = list(named)
        self.parameters = list(named.values())
        self._column, self._row_size = column, row_size
        self._is_alone = column.world_size == 1
        self.finite = torch.ones(len(self.names), dtype=torch.bool)
        """Whether each mean is finite, in the order of `names`; after `finish`."""
        self.share_out(shares)

    def share_out(self, shares: Shares) -> None:
        """Takes other micro-batches, from the next step on."""
        rows = rows_of(shares, self._row_size)
        self._num_leaves = rows[-1][-1].stop
        self._own = rows[self._column.rank]
        if self.codec is not None:
            self.codec.share_out(tuple(range(row[0].start, row[-1].stop) for row in rows))
        nodes = [
            [node for share in row for node in largest_nodes(self._num_leaves, share, self._level)]
            for row in rows
        ]
        self._sum = NodeSum(self._column, nodes, self._num_leaves)

    @property
    def seconds(self) -> float:
        """What its exchanges on the host have taken so far."""
        return self._sum.seconds + (0.0 if self.codec is None else self.codec.seconds)

    def begin(self, scale: Tensor | None) -> None:
        """Begins a step. scale: what losses are multiplied by, if they are, shape ()."""
        if self.codec is not None:
            self.codec.begin_step(scale)
        for each in self.parameters:
            each.grad = None
        self._counters: list[TreeSum[Leaf]] = [
            TreeSum(self._num_leaves, _add_in_place, self._level) for _ in self._own
        ]

    def undo_step(self) -> None:
        """Lets a step of scaled losses that has updated nothing leave no trace in a codec."""
        if self.codec is not None:
            self.codec.undo_step()

    def add(self, of_row: Sequence[tuple[int, Gradients]]) -> None:
        """Adds a micro-batch of each rank of the row: its number, and its gradients, which may be
        changed.
        """
        if not self.names:
            return
        for counter, (leaf, gradients) in zip(self._counters, of_row, strict=True):
            counter.push(Node(0, leaf), self._leaf(gradients))

    def finish(self, weight: float) -> None:
        """Leaves the mean in every `grad`; None if no micro-batch has used the parameter. weight:
        what the sum is divided by. Raises: PeerLostError.
        """
        if not self.names:
            return
        pending = [each for counter in self._counters for each in counter.pending]
        self._counters = []
        pending.sort(key=lambda each: each[0].index << each[0].level)
        nodes = [node for node, _ in pending]
        uses = self._sum([leaf[-1] for _, leaf in pending]).tolist()
        leaves = [leaf[:-1] for _, leaf in pending]
        if self.codec is None:
            found = [self._mean(nodes, vectors, weight) for vectors in zip(*leaves, strict=True)]
        else:
            means = self.codec.mean(nodes, leaves, weight)
            found = [(mean, mean.isfinite().all()) for mean in means]
        for parameter, (mean, _), used in zip(self.parameters, found, uses, strict=True):
            # What a codec kept back may arrive in a step that does not use the parameter.
            has_any = used or (self.codec is not None and bool(mean.any()))
            parameter.grad = mean.view_as(parameter) if has_any else None
        self.finite = torch.stack([is_finite for _, is_finite in found]).cpu()

    def _mean(
        self, nodes: Sequence[Node], vectors: Sequence[Tensor], weight: float
    ) -> tuple[Tensor, Tensor]:
        """A parameter's mean, which may be in the first of the vectors, and whether all of it is
        finite. vectors: of this rank's nodes.
        """
        if not self._is_alone:
            vectors = [self._sum(vectors)]
        ends: list[Tensor] = []
        for block in _blocks(vectors):
            if self._is_alone:
                sum_of_nodes(nodes, block, self._num_leaves, Tensor.add_)
            # Twelve times as fast on a CPU as a norm.
            ends += torch.aminmax(block[0].div_(weight))
        return vectors[0], torch.stack(ends).isfinite().all()

    def _leaf(self, gradients: Gradients) -> Leaf:
        like = self.parameters[0]
        uses = like.new_tensor([float(each in gradients) for each in self.parameters])
        parts = [
            gradients[each].reshape(-1) if each in gradients else each.new_zeros(each.numel())
            for each in self.parameters
        ]
        return [*parts, uses]


def _add_in_place(left: Leaf, right: Leaf) -> Leaf:
    torch._foreach_add_(left, right)
    return left


def _blocks(vectors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The same elements of each vector, as many at a time as stay in the cache."""
    length = len(vectors[0])
    step = length if vectors[0].is_cuda else BLOCK_ELEMENTS
    for start in range(0, length, step):
        yield [vector[start : start + step] for vector in vectors]
