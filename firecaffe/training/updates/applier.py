"""The update of one copy of the weights by gradients that are ready for it."""

from collections.abc import Sequence

from torch import optim

from firecaffe.solvers.optimizer import set_rate
from firecaffe.training.constraints import Constraint
from firecaffe.training.evaluation_weights import Ema
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

    def apply(self, step: int, learning_rate: float, momentum: float | None) -> bool:
        """Update the weights. Return False if the loss scale skips step `step`, counted from 0."""
        set_rate(self.optimizer, learning_rate, momentum)
        for constraint in self.constraints:
            constraint.before_update(step)
        updates = self.scale.step()
        for constraint in self.constraints:
            constraint.after_update(step)
        if self.ema is not None:
            self.ema.update(step)
            for constraint in self.constraints:
                constraint.restrict(self.ema.average)
        return updates
