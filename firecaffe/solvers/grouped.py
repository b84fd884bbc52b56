"""An optimizer whose update is that of a list of weights, in operations over all of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, optim

Groups = Iterable[dict[str, Any]] | Iterable[Tensor]


class GroupedOptimizer(optim.Optimizer):
    """Steps group by group, with those weights of a group that have a gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            if weights:
                self.update(group, weights, [each.grad for each in weights])

    def update(self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor]) -> None:
        """Updates the weights in place. group: what the group was given, as "lr"."""
        raise NotImplementedError
