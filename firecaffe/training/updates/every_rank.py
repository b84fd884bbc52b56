"""An update: how gradients are summed over ranks, who applies the sums, and how."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn, optim

from firecaffe.exchange.leaves import Shares
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.shards import Shards
from firecaffe.gradients.totals import Totals, squared_norm
from firecaffe.solvers.optimizer import set_rate
from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from firecaffe.training.constraints import Constraint
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.forward import seed_random
from firecaffe.training.holdings.holding import Holding, Ready
from firecaffe.training.outcome import Span
from firecaffe.training.piece import Numbers, Piece
from firecaffe.training.updates.spread import Found, LossScale, Spread
from firecaffe.transport.queue import Queue


class Applier:
    def __init__(
        self,
        optimizer: optim.Optimizer,
        scale: LossScale,
        constraints: Sequence[Constraint] = (),
        ema: Ema | None = None,
        seed: int | None = None,
    ) -> None:
        """Make the applier. `seed` seeds the draws of a user's own optimizer; None without one."""
        self.optimizer, self.scale, self.ema = optimizer, scale, ema
        self.constraints, self.seed = constraints, seed

    def pieces(self, network: nn.Module) -> dict[str, Piece]:
        """Return the state that updates keep, under the names of the network's parameters."""
        pieces: dict[str, Piece] = {"optimizer": OptimizerTensors(network, self.optimizer)}
        if self.ema is not None:
            pieces["ema"] = self.ema.piece
        for constraint in self.constraints:
            pieces |= constraint.pieces
        return pieces

    def apply(
        self, step: int, learning_rate: float, momentum: float | None, number: int | None = None
    ) -> bool:
        """Update the weights in step `step`, counted from 0. Return False if the scale skips it.

        `number` counts the updates from 0, if a step may have several; the average follows it.
        """
        set_rate(self.optimizer, learning_rate, momentum)
        for constraint in self.constraints:
            constraint.before_update(step)
        if self.seed is not None:  # else each rank would continue from its own state
            seed_random(self.seed, "update", step if number is None else number)
        updates = self.scale.step()
        for constraint in self.constraints:
            constraint.after_update(step)
        if self.ema is not None:
            self.ema.update(step if number is None else number)
            for constraint in self.constraints:
                constraint.restrict(self.ema.average)
        return updates

    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        """Apply the constraints to weights that were changed elsewhere, and to their average."""
        for constraint in self.constraints:
            constraint.restrict(weights)
            if self.ema is not None:
                constraint.restrict(self.ema.average)


class OwnParameters(nn.Module):
    """A module of parameters whose names have dots, which torch forbids in `nn.Module`."""

    def __init__(self, named: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.named = named

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.named.items())


class EveryRank:
    """An update in which every rank updates all that it holds. `ShardOwners` extends it."""

    reducer: GradientReducer
    shards: Shards | None = None
    """The shards of the weights that ranks update; None if each rank updates all."""

    def __init__(
        self, holding: Holding, applier: Applier, spread: Spread, clip_gradients: float
    ) -> None:
        """Clip gradients to the norm `clip_gradients`; 0 turns clipping off."""
        self.holding, self.applier, self.spread = holding, applier, spread
        self.parts, self._clip = holding.part_sums, clip_gradients

    def connect(self, reducer: GradientReducer) -> Self:
        self.reducer = reducer
        return self

    def pieces(self) -> dict[str, Piece]:
        pieces = self.applier.pieces(self._own)
        return {name: self.piece(piece) for name, piece in pieces.items()}

    @property
    def _own(self) -> nn.Module:
        return self.holding.network

    def piece(self, piece: Piece) -> Piece:
        return self.holding.piece(piece)

    def numbers(self) -> Numbers:
        of_all = OptimizerNumbers(self._own, self.applier.optimizer)
        return self.holding.numbers(of_all)

    def constrain(self) -> None:
        """Make a new training's first weights obey the constraints. All ranks call it."""
        for constraint in self.applier.constraints:
            constraint.begin()

    @property
    def queue(self) -> Queue:
        return self.reducer.queue

    @property
    def is_known(self) -> bool:
        """Whether the result of `check` is known when it returns, and not a step later."""
        return not self.queue.is_async or self.spread.is_known

    def begin(
        self,
        weight: float,
        leaves: Sequence[int],
        counts: Callable[[], Tensor],
        measures: bool = False,
    ) -> None:
        """Begin a step of `weight` full micro-batches, by which sums are divided.

        `leaves` are this rank's micro-batches, in the order in which they are added. `counts` is
        called before the last backward, and returns all that this rank has counted. `measures`
        requests the squared norms of the gradients of micro-batches and of their mean.
        """
        self._weight, self._measures = weight, measures
        self._factor = scale = self.applier.scale.factor
        self.reducer.begin_step(weight, leaves, counts, scale, measures)
        for part in self.parts:
            part.begin(scale)

    def add(self, ready: Ready) -> None:
        """Run backward for a micro-batch, and add its gradients. Complete sums are sent at once."""
        self.reducer.add(ready.leaf, ready.root, ready.tail)
        for part in self.parts:
            part.add(ready.parts)

    def sums(self) -> Totals:
        """Wait for the sums; set each `grad` to the mean. All call it. Raises: PeerLostError."""
        totals = self.reducer.finish_step()
        for part in self.parts:
            part.finish(self._weight)
        return totals

    def check(self, totals: Totals, counted: int) -> Found:
        """Undo the loss scale, clip, check the gradients. All call it. Raises: PeerLostError."""
        finite = torch.cat([self.reducer.finite(), *(part.finite for part in self.parts)])
        self.applier.scale.undo()
        sums = torch.cat([totals.tail[0], totals.counts])
        clips = self._clip > 0
        checked = self.spread.agree(sums, counted, finite, clips, self.applier.scale)
        if self._measures:
            checked = replace(checked, squares=self._squares(totals))
        if clips:
            norm = checked.norm.to(sums.device)
            nn.utils.clip_grads_with_norm_(self._updated, self._clip, norm, foreach=True)
        return checked

    def _squares(self, totals: Totals) -> Tensor:
        assert totals.squares is not None
        of_leaves = totals.squares
        if self._factor is not None:
            of_leaves = of_leaves / self._factor / self._factor  # the factor's square may overflow
        return torch.cat([of_leaves, squared_norm(self.reducer.parameters)])

    @property
    def _updated(self) -> Sequence[nn.Parameter]:
        return [*self.reducer.parameters, *(p for part in self.parts for p in part.parameters)]

    def apply(self, step: int, learning_rate: float, momentum: float | None) -> None:
        """Update the weights, equally on all ranks. All call it. Raises: PeerLostError."""
        if not self.applier.apply(step, learning_rate, momentum):
            self.reducer.undo_step()
            for part in self.parts:
                part.undo_step()

    def set_shares(self, shares: Shares) -> None:
        self.reducer.set_shares(shares)
        for part in self.parts:
            part.set_shares(shares)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the moving average, if there is one, in a `with` block. All ranks call it."""
        self.take_average()
        try:
            yield
        finally:
            self.take_average()

    def take_average(self) -> None:
        """Swap the weights and the moving average, if there is one. A second call swaps back."""
        if self.applier.ema is not None:
            self.applier.ema.exchange()

    def close(self) -> None:
        """Stop exchanging gradients. No rank waits for others from here on."""
        self.reducer.close()

    @property
    def parts_s(self) -> float:
        return sum((part.seconds for part in self.parts), 0.0)

    @property
    def exchanges(self) -> Sequence[Span]:
        """The exchanges of this step that no computation hides, other than those of gradients."""
        return ()
