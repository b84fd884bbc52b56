"""A tensor of which each rank holds some parts, as it goes from one layer to the next.

To a network's own code it looks like the whole tensor, with its shape and type. A function of each
element or each channel is applied part by part (`parallel.rules`). Before any other function the
parts are gathered. So a network always computes with right values and need not be traced: branches,
loops and heads for training alone need no change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from firecaffe.errors import RecipeError
from firecaffe.parallel import flow
from firecaffe.parallel.cut import Cut
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.rules import METADATA, go_on, is_of_tensor_itself


class TensorInParts(Tensor):
    """A tensor that is cut along one dimension. It has no memory of its own."""

    group: PartGroup
    own: list[Tensor]
    cut: Cut
    cut_dim: int
    maker: str
    _gathered: Tensor | None

    @staticmethod
    def __new__(
        cls, group: PartGroup, own: Sequence[Tensor], cut: Cut, cut_dim: int, maker: str
    ) -> Self:
        first = own[group.first_own]
        shape = list(first.shape)
        shape[cut_dim] = cut[-1]
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad
        )
        made.group, made.own, made.cut, made.cut_dim = group, list(own), cut, cut_dim
        made.maker, made._gathered = maker, None
        if first.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(partial(_refuse_gradient, maker))  # type: ignore[no-untyped-call]
        return made

    def with_parts(self, own: Sequence[Tensor], cut: Cut | None = None) -> "TensorInParts":
        return TensorInParts(self.group, own, cut or self.cut, self.cut_dim, self.maker)

    def is_cut_as(self, group: PartGroup, cut: Cut, dim: int) -> bool:
        return self.group is group and self.cut == cut and self.cut_dim == dim

    def changed(self) -> Self:
        self._gathered = None
        return self

    def gathered(self) -> Tensor:
        """Return the whole tensor; parts that several functions need whole are gathered once."""
        self.check_followed()
        known = self._gathered
        wants_gradient = torch.is_grad_enabled() and self.own[0].requires_grad
        if known is None or (wants_gradient and not known.requires_grad):
            known = flow.gather(self.group, self.own, self.cut, self.cut_dim)
            self._gathered = known
        return known

    def check_followed(self) -> None:
        """Check that no autograd.Function made it, which loses gradients. Raises: RecipeError."""
        if self.requires_grad and not self.own[0].requires_grad:
            _refuse_gradient(self.maker)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TensorInParts({tuple(self.shape)}, dimension {self.cut_dim} cut at {self.cut})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        in_parts = [
            argument
            for argument in (*args, *kwargs.values())
            if isinstance(argument, TensorInParts)
        ]
        for tensor in in_parts:
            tensor.check_followed()
        result = go_on(func, in_parts, args, kwargs) if in_parts else NotImplemented
        if result is not NotImplemented:
            return result
        if in_parts and in_parts[0] is (*args, None)[0] and is_of_tensor_itself(func):
            raise RecipeError(
                f"split: {func.__name__} is called on the output of {in_parts[0].maker} itself, "
                "which is in parts; use a function that returns a new tensor, or leave "
                f"{in_parts[0].maker} out of split"
            )
        return func(*whole(args), **whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> NoReturn:
        raise RecipeError(
            f"split: {func} was called on a tensor in parts, past torch's functions; leave the "
            "layer before it out of split"
        )


def _refuse_gradient(maker: str, gradient: Tensor | None = None) -> NoReturn:
    raise RecipeError(
        f"split: the output of {maker} is in parts, and it was given to what is no function of "
        f"torch's own, as a torch.autograd.Function; leave {maker} out of split"
    )


def whole(value: Any) -> Any:
    """Return a value, or a tree of values, with each tensor in parts gathered."""
    return tree_map_only(TensorInParts, TensorInParts.gathered, value)


def copies_of(x: Tensor, group: PartGroup) -> Sequence[Tensor]:
    if isinstance(x, TensorInParts) and x.group is group:
        return flow.copy_gathered(group, x.gathered(), x.own, x.cut, x.cut_dim)
    return flow.copy(group, whole(x))


def parts_of(x: Tensor, group: PartGroup, cut: Cut, dim: int) -> Sequence[Tensor]:
    """Return this rank's parts of a tensor, which are cut out of it if it is not cut so already."""
    if isinstance(x, TensorInParts) and x.is_cut_as(group, cut, dim):
        return x.own
    return flow.slice_own(group, whole(x), cut, dim)
