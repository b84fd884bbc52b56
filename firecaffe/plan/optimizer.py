"""Vectors as long as the weights that an optimizer keeps, and that it makes while it updates.

Both are found by updates of one small matrix. torch's `foreach` forms, and ours, make whole lists
of tensors between two passes over the weights: what these are depends on the optimizer, on its
weight decay and on torch.
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
"""A matrix: some optimizers take no vector."""


class Vectors(NamedTuple):
    """How many there are."""

    kept: int
    made: int
    """At once, at most, in an update; gone after it."""


def vectors_of(solver: SolverConfig) -> Vectors:
    """Those of a solver. Raises: as `make_optimizer`."""
    parameter = nn.Parameter(torch.ones(SHAPE))
    optimizer = make_optimizer({"weight": parameter}, replace(solver, lr_mult={}, decay_mult={}))
    parameter.grad = torch.ones(SHAPE)
    optimizer.step()  # which makes what is kept
    with torch.no_grad(), _Made() as made:
        optimizer.step()
    state = optimizer.state[parameter].values()
    kept = sum(1 for value in state if isinstance(value, Tensor) and value.shape == SHAPE)
    return Vectors(kept, made.most)


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrices that are made, as long as they are there."""

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
            if each.untyped_storage().data_ptr() not in given:  # neither in place nor a view
                self._now += 1
                weakref.finalize(each, self._gone)
        self.most = max(self.most, self._now)
        return made

    def _gone(self) -> None:
        self._now -= 1


def _matrices(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [each for each in leaves if isinstance(each, Tensor) and each.shape == SHAPE]
