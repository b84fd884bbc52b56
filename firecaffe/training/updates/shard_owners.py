"""An update in which each rank updates a shard of the weights and sends it to the others.

A rank has the mean gradients of its shard only. So before the update all ranks agree on which
gradients are finite, and on the norms. A rank has the optimizer's state and the moving average of
its shard only, as pieces under the names of whole parameters. So any layout of ranks can resume
from any other's checkpoint.
"""

from collections.abc import Sequence

import torch
from torch import nn

from firecaffe.gradients.shards import Shards
from firecaffe.gradients.totals import Totals
from firecaffe.solvers.optimizer_state import OptimizerNumbers
from firecaffe.training.holdings.holding import Holding
from firecaffe.training.outcome import Span
from firecaffe.training.parallel.cut_pieces import (
    GatheredWholes,
    Names,
    NumbersInParts,
    PieceInParts,
    PieceSource,
)
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.updates.every_rank import Applier, EveryRank, OwnParameters
from firecaffe.training.updates.spread import Found, Spread


class ShardOwners(EveryRank):
    shards: Shards

    def __init__(
        self,
        holding: Holding,
        shards: Shards,
        applier: Applier,
        spread: Spread,
        clip_gradients: float,
        wholes: GatheredWholes,
    ) -> None:
        """Update views of the rows of this rank's shard. `wholes` combines all ranks' rows."""
        super().__init__(holding, applier, spread, clip_gradients)
        self.shards, self._wholes, self._names = shards, wholes, wholes.names
        self._exchanges: list[Span] = []

    @property
    def _own(self) -> nn.Module:
        return OwnParameters(self.shards.own)

    def piece(self, piece: Piece) -> Piece:
        return PieceInParts(piece, self._names)

    @torch.no_grad()
    def constrain(self) -> None:
        super().constrain()
        named, names = self.holding.named, self.holding.names
        for whole, tensor in self._wholes.one_by_one(self.shards.own):
            local_tensors = {name: named[name] for name in names.own(whole) if name in named}
            self.holding.wholes().put({whole: tensor}, local_tensors)

    def numbers(self) -> Numbers:
        return NumbersInParts(OptimizerNumbers(self._own, self.applier.optimizer), self._names)

    def check(self, totals: Totals, counted: int) -> Found:
        begun = self.queue.mark()
        checked = super().check(totals, counted)
        self._exchanges = [(begun, self.queue.mark())]
        return checked

    @property
    def _updated(self) -> Sequence[nn.Parameter]:
        return list(self.shards.own.values())

    def apply(self, step: int, learning_rate: float, momentum: float | None) -> None:
        super().apply(step, learning_rate, momentum)
        begun = self.queue.mark()
        self.reducer.gather_weights()
        self._exchanges.append((begun, self.queue.mark()))

    @torch.no_grad()
    def take_average(self) -> None:
        ema = self.applier.ema
        if ema is None:
            return
        for weight, average in zip(self._updated, ema.average.values(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        self.reducer.gather_weights()

    @property
    def exchanges(self) -> Sequence[Span]:
        return self._exchanges


def names_of(shards: Shards, names: Names) -> Names:
    """Return the names of what this rank updates: tensors of `names`, whole or rows of them."""
    sources = {name: names.source(name)[0] for name in shards.own}
    elsewhere = names.places.keys() - {source.whole for source in sources.values()}
    rows = {
        name: PieceSource(name, 0, cut, shards.rank)
        for name, cut in shards.rows.items()
        if name in shards.own and (cut[shards.rank], cut[shards.rank + 1]) != (0, cut[-1])
    }
    return Names(sources | rows, names.places, frozenset(elsewhere))
