"""Steps in which each rank updates a shard of the weights, and gives it to the others.

A rank has the mean gradients of its shard alone. Which of them are finite, and their norms, all
have to know before the update: zeros stand for what others have, so a sum over ranks rounds
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from firecaffe.cluster.agree import finish
from firecaffe.gradients.totals import Totals
from firecaffe.training.outcome import Outcome, Timings
from firecaffe.training.step import Stepper
from firecaffe.transport.queue import Mark


@dataclass
class ShardStepper(Stepper):
    """Runs steps of a rank that updates a shard."""

    _norms: Tensor = field(default_factory=lambda: torch.zeros(0))
    """The norms of all gradients of the step, if they are clipped."""
    _waited: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Marks before and after each exchange of the step beside that of gradients."""

    def _finite(self) -> Tensor:
        """The same of all ranks' gradients. Raises: PeerLostError."""
        queue, world = self.reducer.queue, self.reducer.exchange.world
        begun = queue.mark()
        own = self.reducer.finite().to(world.device)
        told = torch.cat([1.0 - own.double(), self._own_norms(own)])
        finish(world, partial(dist.all_reduce, told, group=world.group))
        self._waited = [(begun, queue.mark())]
        broken, self._norms = told.tensor_split([len(own)])
        return broken == 0

    def _own_norms(self, finite: Tensor) -> Tensor:
        """The norms of this rank's gradients among those of all, if they are clipped."""
        norms = torch.zeros_like(finite, dtype=torch.float64)
        if not self.clip_gradients:
            return norms[:0]
        place_of = {name: place for place, name in enumerate(self.reducer.names)}
        for name, each in self._own.items():
            if each.grad is not None:
                norms[place_of[name]] = torch._foreach_norm([each.grad])[0]
        return norms

    def _scale_gradients(self) -> Tensor:
        """Clips. Returns the norm of all gradients; 0 if none is clipped."""
        if not self.clip_gradients:
            return torch.zeros((), device=self.forward.device)
        # As clip_grad_norm_ has it: the norm of the norms of all gradients, in network order.
        dtypes = (each.dtype for each in self.reducer.parameters)
        used, norms = self.reducer.used, self._norms.to(reduce(torch.promote_types, dtypes))
        norm: Tensor = torch.linalg.vector_norm(norms if all(used) else norms[used])
        own = self._own.values()
        nn.utils.clip_grads_with_norm_(own, self.clip_gradients, norm, foreach=True)
        return norm

    @property
    def _own(self) -> dict[str, nn.Parameter]:
        assert self.reducer.shards is not None
        return self.reducer.shards.own

    def update(self, step: int, learning_rate: float, totals: Totals, weight: float) -> None:
        """Updates this rank's shard, and takes the others'. Raises: PeerLostError."""
        super().update(step, learning_rate, totals, weight)
        begun = self.reducer.queue.mark()
        self.reducer.gather_weights()
        self._waited.append((begun, self.reducer.queue.mark()))

    def _outcome(self) -> Callable[..., Outcome]:
        return partial(ShardOutcome, waited=self._waited)


@dataclass(frozen=True)
class ShardOutcome(Outcome):
    """The outcome of a step, with exchanges that no computation hides."""

    waited: list[tuple[Mark, Mark]]

    def _timings(self) -> Timings:
        found = super()._timings()
        waited_s = sum(end.seconds_after(begin) for begin, end in self.waited)
        return replace(
            found,
            exposed_communication_s=found.exposed_communication_s + waited_s,
            exchange_s=found.exchange_s + waited_s,
            update_s=found.update_s - waited_s,
        )
