"""What replicas' optimizers keep for each weight, averaged with the weights if the recipe says so.

These are tensors in the form of the weights: the momentum of sgd, both moments of adam. Counts of
updates stay each replica's own. They go in the tail of an average, and no codec encodes them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from firecaffe.training.local.replicas import Replica

STEP = "step"
"""The name of torch's counts, which have the form of a weight that is one number."""


@dataclass(frozen=True)
class Moments:
    """Which there are: (a parameter's name, the key of its optimizer)."""

    named: Mapping[str, nn.Parameter]
    keys: Sequence[tuple[str, str]] = ()

    def none(self) -> list[Tensor]:
        """The sums over no replica."""
        return [torch.zeros_like(self.named[name]) for name, _ in self.keys]

    def of(self, replica: Replica) -> list[Tensor]:
        """A replica's; zeros for what its optimizer has not made."""
        return [
            zeros if kept is None else kept
            for zeros, kept in zip(self.none(), self._kept(replica), strict=True)
        ]

    def give(self, replica: Replica, means: Sequence[Tensor]) -> None:
        """Gives a replica the means, as far as its optimizer has made them."""
        for kept, mean in zip(self._kept(replica), means, strict=True):
            if kept is not None:
                kept.copy_(mean)

    def _kept(self, replica: Replica) -> list[Tensor | None]:
        state = replica.optimizer.state
        return [state.get(self.named[name], {}).get(key) for name, key in self.keys]


def find_moments(
    named: Mapping[str, nn.Parameter],
    make: Callable[[dict[str, nn.Parameter]], optim.Optimizer],
) -> Moments:
    """Finds out what an optimizer keeps, from an update of copies. make: the optimizer of some
    parameters.
    """
    if not named:
        return Moments(named)
    copies = {name: nn.Parameter(each.detach().clone()) for name, each in named.items()}
    for each in copies.values():
        each.grad = torch.zeros_like(each)
    optimizer = make(copies)
    optimizer.step()
    keys = [
        (name, key)
        for name, each in copies.items()
        for key, kept in sorted(optimizer.state.get(each, {}).items())
        if isinstance(kept, Tensor) and kept.shape == each.shape and key != STEP
    ]
    return Moments(named, keys)
