"""The one way in which an update is made of gradients that are ready for it."""

from collections.abc import Sequence

from torch import optim

from firecaffe.solvers.optimizer import set_rate
from firecaffe.training.constraints import Constraint
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.updates.loss_scale import LossScale


class Applier:
    """Applies gradients to one copy of the weights."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        scale: LossScale,
        constraints: Sequence[Constraint] = (),
        ema: Ema | None = None,
    ) -> None:
        """constraints: what the weights have to obey, in the order in which they act. ema: the
        moving average of these weights, if one is kept.
        """
        self.optimizer, self.scale, self.ema = optimizer, scale, ema
        self.constraints = constraints

    def apply(self, step: int, learning_rate: float, momentum: float | None) -> bool:
        """Updates the weights by the gradients of step `step`, counted from 0. momentum: None: as
        it is. Returns whether it has: with a loss scale it may not.
        """
        set_rate(self.optimizer, learning_rate, momentum)
        for each in self.constraints:
            each.before_update(step)
        updates = self.scale.step()
        for each in self.constraints:
            each.after_update(step)
        if self.ema is not None:
            self.ema.update(step)
            for each in self.constraints:
                each.restrict(self.ema.average)
        return updates
