"""The exchanges between layers, each with its conjugate as its gradient.

| forward | backward |
|---|---|
| `copy`: a whole tensor goes to all parts | the sum over parts of its gradients |
| `add`: the sum over parts is whole | its gradient goes to all parts |
| `gather`: parts are put together | each rank takes its parts of the gradient |
| `copy_gathered`: parts that were put together go to all parts | the sum, each rank's parts of it |
| `slice_own`: each rank takes its parts | the parts of the gradient are put together |

A whole tensor is equal on all ranks, and so is its gradient. With one weird trick it is that of
each rank's own samples, and each rank has its parts of all samples (`parallel.own_samples`).
Source: Shoeybi et al. 2019 (Megatron-LM), section 3, for the conjugate pairs.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.parallel.cut import Cut
from firecaffe.parallel.parts import PartGroup


def copy(group: PartGroup, whole: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor for each of this rank's parts; it must not be changed in place."""
    made: tuple[Tensor, ...] = _Copy.apply(group, whole)  # type: ignore[no-untyped-call]
    return made


def add(group: PartGroup, own: Sequence[Tensor]) -> Tensor:
    made: Tensor = _Add.apply(group, *own)  # type: ignore[no-untyped-call]
    return made


def gather(group: PartGroup, own: Sequence[Tensor], cut: Cut, dim: int) -> Tensor:
    made: Tensor = _Gather.apply(group, cut, dim, *own)  # type: ignore[no-untyped-call]
    return made


def copy_gathered(
    group: PartGroup, gathered: Tensor, own: Sequence[Tensor], cut: Cut, dim: int
) -> tuple[Tensor, ...]:
    """Do `gather`, then `copy`, if no rank needs the whole sum. `gathered` is `own` as a whole."""
    made: tuple[Tensor, ...] = _CopyGathered.apply(  # type: ignore[no-untyped-call]
        group, cut, dim, gathered.detach(), *own
    )
    return made


def slice_own(group: PartGroup, whole: Tensor, cut: Cut, dim: int) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _Slice.apply(group, cut, dim, whole)  # type: ignore[no-untyped-call]
    return made


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, group: PartGroup, whole: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(group.copies(whole))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.group.sum(gradients)


class _Add(Function):
    @staticmethod
    def forward(ctx: Any, group: PartGroup, *own: Tensor) -> Tensor:
        ctx.group = group
        return group.sum(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.group.copies(gradient)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, group: PartGroup, cut: Cut, dim: int, *own: Tensor) -> Tensor:
        ctx.group, ctx.cut, ctx.dim = group, cut, dim
        return group.gather(own, cut, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.group.slice(gradient, ctx.cut, ctx.dim)


class _CopyGathered(Function):
    @staticmethod
    def forward(
        ctx: Any, group: PartGroup, cut: Cut, dim: int, gathered: Tensor, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut, ctx.dim = group, cut, dim
        return tuple(group.copies(gathered))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.group.sum_own(gradients, ctx.cut, ctx.dim)


class _Slice(Function):
    @staticmethod
    def forward(
        ctx: Any, group: PartGroup, cut: Cut, dim: int, whole: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut, ctx.dim = group, cut, dim
        return tuple(group.slice(whole, cut, dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, ctx.group.gather(gradients, ctx.cut, ctx.dim)
