"""Where a stage's part of autograd's graph begins and ends.

It begins at tensors that have arrived, of which the gradient goes back to the stage before. It ends
at tensors that were passed on, of which the gradient has come from the stage after; they have one
root in common, so that whoever differentiates a loss differentiates that.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Arrivals:
    """Tensors that have arrived, and their gradients after backward."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: of which the gradient is wanted. They become results of autograd's, in place, so
        that the stage may change them as it could if they were made here.
        """
        self.gradients: list[Tensor | None] = [None] * len(tensors)
        """Of each tensor; None if nothing depends on it."""
        handle = torch.empty(0, requires_grad=True)
        for place, tensor in enumerate(tensors):
            _Arrive.apply(self.gradients, place, handle, tensor)  # type: ignore[no-untyped-call]


def root_of(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor | None:
    """A scalar whose backward gives each tensor its gradient; None if none has one. It is to be
    differentiated as it is.
    """
    if all(gradient is None for gradient in gradients):
        return None
    root: Tensor = _Root.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return root


class _Arrive(Function):
    @staticmethod
    def forward(
        ctx: Any, into: list[Tensor | None], place: int, handle: Tensor, tensor: Tensor
    ) -> Tensor:
        ctx.into, ctx.place = into, place
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.into[ctx.place] = gradient
        return None, None, None, None


class _Root(Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients
