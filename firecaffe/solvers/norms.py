"""The lengths of tensors, for solvers that need those of whole layers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Norms = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], Sequence[Sequence[Tensor]]]
"""(weights, lists of tensors shaped as these) -> of each list the L2 norms, each of shape (). If a
weight is a part of one that several ranks hold, they are those of the whole tensors."""


def own_norms(_: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """The norms of tensors that this rank has whole; see `Norms`."""
    return [torch._foreach_norm(list(each)) if each else [] for each in lists]
