"""A tensor of which each rank holds some parts, and torch's functions that work part by part.

To a network's own code the tensor looks like the whole tensor, with its shape and type. A function
of each element or each channel is applied part by part. Before any other function the parts are
gathered. So a network always computes with right values and need not be traced: branches, loops and
heads for training alone need no change.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, pairwise
from math import prod
from typing import Any, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from firecaffe.errors import RecipeError
from firecaffe.parallel import flow, rows
from firecaffe.parallel.cut import Cut, scaled
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.rows import with_halos

Function = Callable[..., Any]

METADATA: set[Function] = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
}

PER_ELEMENT: set[Function] = {
    *(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6, F.hardtanh),
    *(F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.softplus, F.softsign),
    *(F.threshold, F.hardswish, F.hardsigmoid, F.logsigmoid, F.hardshrink, F.softshrink),
    *(F.tanhshrink, F.sigmoid, torch.sigmoid, Tensor.sigmoid, F.tanh, torch.tanh, Tensor.tanh),
    *(torch.exp, Tensor.exp, torch.log, Tensor.log, torch.sqrt, Tensor.sqrt, torch.abs, Tensor.abs),
    *(torch.square, Tensor.square, torch.neg, Tensor.neg, torch.clamp, Tensor.clamp),
    *(torch.add, Tensor.add, Tensor.add_, torch.sub, Tensor.sub, Tensor.sub_, Tensor.__rsub__),
    *(torch.mul, Tensor.mul, Tensor.mul_, torch.div, Tensor.div, Tensor.div_, Tensor.__rdiv__),
    *(torch.pow, Tensor.pow, Tensor.contiguous, torch.clone, Tensor.clone, Tensor.detach),
    *(Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
}
"""Functions of each element by itself, of one tensor or of several with equal shapes."""

PER_CHANNEL: set[Function] = {
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
    *(F.lp_pool2d, F.upsample, F.interpolate),
}
"""Functions of each channel of images by itself, over its rows and columns."""


IN_PLACE_NAMES = ("__setitem__", "__set__", "register_hook", "retain_grad")


def is_in_place(func: Function) -> bool:
    """Whether a function changes its first argument, going by torch's names, or hooks it."""
    name = getattr(func, "__name__", "")
    return name in IN_PLACE_NAMES or (name.endswith("_") and not name.endswith("__"))


def go_on(
    func: Function,
    found: Sequence["TensorInParts"],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Apply a function to tensors in parts (`found`); NotImplemented if it needs whole tensors."""
    x = found[0]
    if func in PER_ELEMENT or (func in PER_CHANNEL and x.cut_dim == x.ndim - 3):
        return _part_by_part(func, found, args, kwargs)
    rule = RULES.get(func)
    if rule is None or not args or args[0] is not x:
        return NotImplemented
    return rule(*args, **kwargs)


def _part_by_part(
    func: Function,
    in_parts: Sequence["TensorInParts"],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    x = in_parts[0]
    in_place = is_in_place(func) and len(args) > 0 and args[0] is x
    own_of: dict[int, Sequence[Tensor]] = {}
    for argument in (*args, *kwargs.values()):
        if any(argument is other for other in in_parts):
            # A tensor of another shape would be broadcast over the parts.
            if argument.shape != x.shape or not argument.is_cut_as(x.group, x.cut, x.cut_dim):
                return NotImplemented
            own_of[id(argument)] = argument.own
        elif isinstance(argument, Tensor):
            # The gradient of a whole tensor would need all parts, on all ranks.
            if not in_place or argument.shape != x.shape:
                return NotImplemented
            own_of[id(argument)] = flow.slice_own(x.group, argument, x.cut, x.cut_dim)

    def part(argument: Any, number: int) -> Any:
        return own_of[id(argument)][number] if id(argument) in own_of else argument

    outputs = [
        func(
            *(part(argument, number) for argument in args),
            **{name: part(argument, number) for name, argument in kwargs.items()},
        )
        for number in range(len(x.own))
    ]
    if not all(isinstance(output, Tensor) for output in outputs):
        return NotImplemented  # as a max pool that also returns indices
    is_same = all(after is before for after, before in zip(outputs, x.own, strict=True))
    return x.changed() if is_same else x.with_parts(outputs)


def _flatten(x: "TensorInParts", start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    if start < x.cut_dim <= end:
        return NotImplemented  # parts would not be consecutive
    if end < x.cut_dim and end > start:
        return NotImplemented  # the cut would be of another dimension
    parts = [part.flatten(start, end) for part in x.own]
    by = prod(x.shape[start + 1 : end + 1]) if start == x.cut_dim else 1
    return x.with_parts(parts, scaled(x.cut, by))


def _view(x: "TensorInParts", *shape: Any, **named: Any) -> Any:
    # The usual `x.view(x.size(0), -1)` is a flatten, and may be undone. Other views must keep the
    # cut dimension, and all dimensions before it.
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if named or not all(isinstance(length, int) for length in wanted):
        return NotImplemented
    rest = x.numel() // max(1, prod(length for length in wanted if length != -1))
    wanted = tuple(rest if length == -1 else length for length in wanted)
    if wanted == (*x.shape[: x.cut_dim], prod(x.shape[x.cut_dim :])):
        return _flatten(x, x.cut_dim)
    if prod(wanted) != x.numel() or 0 in wanted:
        return NotImplemented
    columns = prod(wanted[x.cut_dim + 1 :])
    if wanted[: x.cut_dim] == tuple(x.shape[: x.cut_dim]) and x.ndim == x.cut_dim + 1:
        if any(end % columns for end in x.cut):
            return NotImplemented
        parts = [part.reshape(*part.shape[:-1], -1, *wanted[x.ndim :]) for part in x.own]
        return x.with_parts(parts, tuple(end // columns for end in x.cut))
    kept = x.cut_dim + 1
    if wanted[:kept] != tuple(x.shape[:kept]):
        return NotImplemented
    return x.with_parts([part.reshape(*part.shape[:kept], *wanted[kept:]) for part in x.own])


def _dropout(
    x: "TensorInParts", p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    # Each rank draws the mask of the whole tensor, as without a cut, and uses its parts of the
    # mask. So all ranks must draw the same numbers.
    if not training or p == 0:
        return x
    one = torch.ones((), dtype=x.dtype, device=x.device)
    kept = F.dropout(one.expand(x.shape), p) != 0
    # With one weird trick, ranks send the mask to each other, so send bytes.
    own_kept = x.group.slice(kept.to(torch.uint8), x.cut, x.cut_dim)
    masks = [torch.where(kept_part != 0, one / (1 - p), 0) for kept_part in own_kept]
    if inplace:
        for part, own_mask in zip(x.own, masks, strict=True):
            part.mul_(own_mask)
        return x.changed()
    return x.with_parts([part * mask for part, mask in zip(x.own, masks, strict=True)])


def _local_response_norm(x: "TensorInParts", size: int, *settings: Any, **named: Any) -> Any:
    # Each part needs the neighbors' channels by which its own channels are normalized.
    if x.cut_dim == 0 or x.ndim < 3:
        return NotImplemented
    if x.cut_dim > 1:
        return x.with_parts([F.local_response_norm(y, size, *settings, **named) for y in x.own])
    before, after, ends = size // 2, (size - 1) // 2, x.cut
    windows = tuple(
        range(max(0, start - before), min(stop + after, ends[-1])) for start, stop in pairwise(ends)
    )
    seen = with_halos(x, windows)
    normalized = [
        F.local_response_norm(part, size, *settings, **named).narrow(
            1, ends[number] - windows[number].start, ends[number + 1] - ends[number]
        )
        for number, part in zip(cycle(x.group.own), seen, strict=False)
    ]
    return x.with_parts(normalized)


RULES: dict[Function, Callable[..., Any]] = {
    torch.flatten: _flatten,
    Tensor.flatten: _flatten,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    F.dropout: _dropout,
    F.local_response_norm: _local_response_norm,
    F.max_pool2d: rows.max_pool,
    F.avg_pool2d: rows.average_pool,
}
"""Functions that need to know how their first argument, a tensor in parts, is cut."""


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
        self.check_autograd()
        known = self._gathered
        wants_gradient = torch.is_grad_enabled() and self.own[0].requires_grad
        if known is None or (wants_gradient and not known.requires_grad):
            known = flow.gather(self.group, self.own, self.cut, self.cut_dim)
            self._gathered = known
        return known

    def check_autograd(self) -> None:
        """Check that no autograd.Function made it: gradients would be lost. Raises: RecipeError."""
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
            tensor.check_autograd()
        result = go_on(func, in_parts, args, kwargs) if in_parts else NotImplemented
        if result is not NotImplemented:
            return result
        if in_parts and in_parts[0] is (*args, None)[0] and is_in_place(func):
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
