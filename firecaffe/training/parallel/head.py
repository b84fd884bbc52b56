"""The layers that one weird trick splits: the sums of their gradients, and their updates.

They may be updated n times in a step, which is a smaller batch for them than for the convolutions.
Update g is by the micro-batches whose numbers are g modulo n. So a worker, whose micro-batches are
consecutive, has as many of each update, and computes those of the first one first; and which these
are depends on no worker. Numbered m // n they are the leaves of a tree of their own.
Each update has the step's learning rate, momentum and weight decay, whole.

Source: Krizhevsky 2014 (arXiv 1404.5997), on the variable batch size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from firecaffe.parallel.own_samples import Gradients
from firecaffe.recipe.parallel import rows_of
from firecaffe.recipe.run import Run
from firecaffe.training.parallel.coded import PartCodec
from firecaffe.training.parallel.network import SplitNetwork
from firecaffe.training.parallel.sums import PartSums


class Head:
    """In each step for each update: `begin`, `add` for each micro-batch of a rank, `finish`."""

    def __init__(
        self,
        split: SplitNetwork,
        named: Mapping[str, nn.Parameter],
        run: Run,
        codec: PartCodec | None = None,
    ) -> None:
        """named: the parameters that are trained. codec: what encodes gradients of parts, if
        something does.
        """
        self.updates, self._order = split.head_updates, run.order
        self._num_leaves = run.num_leaves
        mesh, self._row_size = split.mesh, split.mesh.row.world_size
        self._own = mesh.row.rank
        shares = [range(s.start // self.updates, s.stop // self.updates) for s in run.shares]
        parts = {name: each for name, each in named.items() if each in split.parameters}
        # Of its own samples each rank has the gradient of these.
        biases = {name: each for name, each in named.items() if each in split.biases}
        self._biases = list(biases.values())
        self._parts = PartSums(parts, mesh.column, self._rows(shares), codec)
        self._of_biases = PartSums(biases, mesh.world, [(share,) for share in shares])
        self.names = [*self._parts.names, *self._of_biases.names]
        self.finite = torch.ones(len(self.names), dtype=torch.bool)
        """Whether each mean of the step so far is finite, in the order of `names`."""

    def share_out(self, shares: Sequence[range]) -> None:
        """Takes other micro-batches of all ranks, from the next step on, if there is one update."""
        self._parts.share_out(self._rows(shares))

    def _rows(self, shares: Sequence[range]) -> list[tuple[range, ...]]:
        return [tuple(row) for row in rows_of(shares, self._row_size)]

    @property
    def seconds(self) -> float:
        """What its exchanges on the host have taken so far."""
        return self._parts.seconds + self._of_biases.seconds

    def begin_step(self) -> None:
        self.finite = torch.ones_like(self.finite)
        self.begin()

    def begin(self) -> None:
        """Begins an update."""
        self._parts.begin()
        self._of_biases.begin()

    def add(self, leaves: Sequence[int], of_ranks: Sequence[Gradients]) -> None:
        """Adds a micro-batch of each rank of the row. leaves: their numbers. of_ranks: the
        gradients of this rank's parts by each; they may be changed.
        """
        numbers = [leaf // self.updates for leaf in leaves]
        self._parts.add(numbers, of_ranks)
        own: dict[nn.Parameter, Tensor] = {}
        for each in self._biases:
            if each.grad is not None:
                own[each], each.grad = each.grad, None
        self._of_biases.add([numbers[self._own]], [own])

    def finish(self, step: int, update: int) -> bool:
        """Leaves the mean gradients of an update. Returns whether there are any: at the end of an
        epoch all of its micro-batches may be empty.

        Raises: PeerLostError.
        """
        leaves = range(update, self._num_leaves, self.updates)
        samples = sum(self._order.samples_in_leaf(step, leaf) for leaf in leaves)
        if not samples:
            return False
        for sums in (self._parts, self._of_biases):
            sums.finish(samples / self._order.micro_batch_size)
        self.finite &= torch.cat([self._parts.finite, self._of_biases.finite])
        return True
