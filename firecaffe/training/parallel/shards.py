"""The state of a training whose ranks update a shard of the weights each.

Each rank holds all weights, and the optimizer's state and the moving average of its shard. These
are pieces in parts, by the names of whole parameters, so that any layout goes on from any other's
checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from firecaffe.gradients.shards import Shards
from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from firecaffe.training.ema import Ema
from firecaffe.training.parallel.pieces import InParts, Names, NumbersInParts, Source
from firecaffe.training.state import State


def hold_shards(
    state: State, model: nn.Module, shards: Shards, optimizer: optim.Optimizer, ema: Ema | None
) -> None:
    """Lets a state hold what a rank keeps of its shard, instead of the same of all weights.

    optimizer, ema: of the shard.
    """
    names = _names(model, shards)
    own = _Own(shards.own)
    state.pieces["optimizer"] = InParts(OptimizerTensors(own, optimizer), names)
    state.numbers["scalars"] = NumbersInParts(OptimizerNumbers(own, optimizer), names)
    state.numbers_in_parts.add("scalars")
    if ema is not None:
        state.pieces["ema"] = InParts(ema.piece, names)


def _names(model: nn.Module, shards: Shards) -> Names:
    places = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    elsewhere = shards.rows.keys() - shards.own.keys()
    cut = {
        name: Source(name, 0, rows, shards.rank)
        for name, rows in shards.rows.items()
        if name in shards.own and (rows[shards.rank], rows[shards.rank + 1]) != (0, rows[-1])
    }
    return Names(cut, places, frozenset(elsewhere))


class _Own(nn.Module):
    """Parameters by names with dots, which a module's own may not have."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = named

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named.items())


class ShardEma(Ema):
    """A moving average of which each rank has its shard."""

    def __init__(self, own: Ema, gather: Callable[[], None]) -> None:
        """own: of the rows of this rank, which are views of the weights. gather: gives all ranks
        each other's rows of the weights.
        """
        vars(self).update(vars(own))
        self._gather = gather

    @torch.no_grad()
    def exchange(self) -> None:
        """Puts the whole average in the weights' place, and back. All ranks call it.

        Raises: PeerLostError.
        """
        for weight, average in zip(self._weights, self.average.values(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        self._gather()
