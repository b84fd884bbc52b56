"""Counts the vectors as long as the weights that an optimizer keeps, and makes during an update.

Both are measured by updates of one small matrix, because torch's `foreach` forms, and ours, make
lists of tensors that depend on the optimizer, its weight decay and torch.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import make_optimizer

SHAPE = (8, 8)
"""A matrix, because some optimizers take no vector."""


class Vectors(NamedTuple):
    kept: int
    made: int
    """The most that exist at once in an update; they are gone after it."""


def vectors_of(solver: SolverConfig) -> Vectors:
    """Count a solver's vectors. Raises: as `make_optimizer`."""
    parameter = nn.Parameter(torch.ones(SHAPE))
    optimizer = make_optimizer({"weight": parameter}, replace(solver, lr_mult={}, decay_mult={}))
    parameter.grad = torch.ones(SHAPE)
    optimizer.step()  # the first step makes the vectors that are kept
    with torch.no_grad(), _Made() as made:
        optimizer.step()
    state = optimizer.state[parameter].values()
    kept = sum(1 for value in state if isinstance(value, Tensor) and value.shape == SHAPE)
    return Vectors(kept, made.most)


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {each.untyped_storage().data_ptr() for each in _matrices((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for each in _matrices(made):
            if each.untyped_storage().data_ptr() not in given:  # not in place, not a view
                self._now += 1
                weakref.finalize(each, self._gone)
        self.most = max(self.most, self._now)
        return made

    def _gone(self) -> None:
        self._now -= 1


def _matrices(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [each for each in leaves if isinstance(each, Tensor) and each.shape == SHAPE]
