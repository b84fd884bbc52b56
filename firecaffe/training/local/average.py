"""The average of a fragment of all replicas: their differences go through the exchange as gradients
do.

Replica r is leaf r of the tree. What it brings is x - x_r, x being the weights that all began with;
beside it in the tail, the changes of its buffers, and the losses of its steps since the last
average of any fragment. So an average costs what a gradient of the same parameters does, by any
exchange or codec, and its bits are the same on any number of workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.totals import Totals
from firecaffe.solvers.outer import Outer
from firecaffe.training.ema import Ema
from firecaffe.training.forward import Forward
from firecaffe.training.local.moments import Moments
from firecaffe.training.local.replicas import Fragment, Replica, Replicas, copy


@dataclass
class Average:
    """Takes the average of a fragment of the replicas, and applies it."""

    fragment: Fragment
    reducer: GradientReducer
    """Of the fragment's parameters, with the replicas as leaves."""
    forward: Forward
    replicas: Replicas
    order: Sequence[int]
    """This rank's replicas, in the order in which the reducer takes them."""
    moments: Moments
    """Those that are averaged too."""
    outer: Outer
    forgets: bool
    """Whether replicas' optimizers begin anew after it."""
    ema: Ema | None
    """The moving average of the network at rest, if one is kept."""

    @torch.no_grad()
    def begin(self, losses: dict[int, Tensor], counts: Tensor) -> None:
        """Sends the differences on their way. losses: of each of this rank's replicas. counts: of
        this rank.
        """
        by_number = {replica.number: replica for replica in self.replicas.own}
        self.reducer.begin_step(self.reducer.num_leaves, self.order, lambda: counts)
        self.forward.buffers.begin_step()
        for number in self.order:
            replica = by_number[number]
            for name, parameter in self.fragment.named.items():
                parameter.grad = parameter - replica.weights[name]
            changes = self._changes(replica) if self.fragment.has_buffers else []
            tail = [losses[number], *self.moments.of(replica), *changes]
            self.reducer.add(number, None, tail)

    def _changes(self, replica: Replica) -> list[Tensor]:
        """Those of its buffers. The network's are as they were afterwards."""
        buffers = self.forward.buffers
        copy(self.replicas.model.buffers(), replica.buffers.values())
        changes = buffers.take(replica.number, 1.0)
        buffers.begin_micro_batch()
        return changes

    def finish(self) -> Totals:
        """Waits for the others' differences. The mean difference is in `p.grad` of the fragment's
        parameters then, and the others have none.

        Raises: PeerLostError.
        """
        for parameter in self.replicas.named.values():
            parameter.grad = None
        return self.reducer.finish_step()

    @torch.no_grad()
    def apply(self, totals: Totals, steps: range, learning_rate: float) -> None:
        """Updates the network at rest by what has come. steps: since the last average of these
        parameters.
        """
        count, first = self.reducer.num_leaves, 1 + len(self.moments.keys)
        self.outer.step(learning_rate)
        if self.ema is not None:
            self.ema.update_after(steps, self.fragment.named)
        if self.fragment.has_buffers:
            self.forward.buffers.begin_step()
            self.forward.buffers.finish_step(totals.tail[first:], count)
        means = [total / count for total in totals.tail[1:first]]
        for replica in self.replicas.own:
            self.moments.give(replica, means)
        for parameter in self.fragment.named.values():
            parameter.grad = None
        if self.forgets:
            self.replicas.forget(self.fragment)
