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

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from firecaffe.parallel.cut import Cut
from firecaffe.parallel.parts import PartGroup


def copy(group: PartGroup, whole: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor for each of this rank's parts; it must not be changed in place."""
    return with_conjugate(group.copies, lambda *parts: [group.sum(parts)], whole)


def add(group: PartGroup, own: Sequence[Tensor]) -> Tensor:
    return with_conjugate(lambda *parts: [group.sum(parts)], group.copies, *own)[0]


def gather(group: PartGroup, own: Sequence[Tensor], cut: Cut, dim: int) -> Tensor:
    return with_conjugate(
        lambda *parts: [group.gather(parts, cut, dim)],
        lambda whole: group.slice(whole, cut, dim),
        *own,
    )[0]


def copy_gathered(
    group: PartGroup, gathered: Tensor, own: Sequence[Tensor], cut: Cut, dim: int
) -> tuple[Tensor, ...]:
    """Do `gather`, then `copy`, if no rank needs the whole sum. `gathered` is `own` as a whole."""
    whole = gathered.detach()
    return with_conjugate(
        lambda *_: group.copies(whole), lambda *parts: group.sum_own(parts, cut, dim), *own
    )


def slice_own(group: PartGroup, whole: Tensor, cut: Cut, dim: int) -> tuple[Tensor, ...]:
    return with_conjugate(
        lambda x: group.slice(x, cut, dim), lambda *parts: [group.gather(parts, cut, dim)], whole
    )


Exchange = Callable[..., Sequence[Tensor]]
Gradient = Callable[..., Sequence[Tensor | None]]


def with_conjugate(forward: Exchange, backward: Gradient, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return `forward` of tensors; `backward` maps the gradients of its results to theirs."""
    made: tuple[Tensor, ...] = _Pair.apply(  # type: ignore[no-untyped-call]
        forward, backward, *tensors
    )
    return made


class _Pair(Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Exchange, backward: Gradient, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = backward
        return tuple(forward(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.exchange(*gradients)
