"""The update of one copy of the weights by gradients that are ready for it."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn, optim

from firecaffe.solvers.optimizer import set_rate
from firecaffe.solvers.optimizer_state import OptimizerTensors
from firecaffe.training.constraints import Constraint
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.piece import Piece
from firecaffe.training.updates.loss_scale import LossScale


class Applier:
    def __init__(
        self,
        optimizer: optim.Optimizer,
        scale: LossScale,
        constraints: Sequence[Constraint] = (),
        ema: Ema | None = None,
    ) -> None:
        self.optimizer, self.scale, self.ema = optimizer, scale, ema
        self.constraints = constraints

    def pieces(self, network: nn.Module) -> dict[str, Piece]:
        """Return what it keeps, whose names are those of the network's parameters."""
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

        number: of the update, counted from 0, if steps have several; it decides for the average.
        """
        set_rate(self.optimizer, learning_rate, momentum)
        for constraint in self.constraints:
            constraint.before_update(step)
        updates = self.scale.step()
        for constraint in self.constraints:
            constraint.after_update(step)
        if self.ema is not None:
            self.ema.update(step if number is None else number)
            for constraint in self.constraints:
                constraint.restrict(self.ema.average)
        return updates

    def restrict(self, weights: Mapping[str, Tensor]) -> None:
        """Make these weights, which others have changed, and their average obey the constraints."""
        for constraint in self.constraints:
            constraint.restrict(weights)
            if self.ema is not None:
                constraint.restrict(self.ema.average)
