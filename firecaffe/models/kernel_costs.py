"""Records the kernels that a network's calls start.

They are operators of torch on the meta device, so that functions count as modules do:
residual additions, attention, a softmax. An operator that only makes a view has no kernel.
Operations are those of `torch.utils.flop_counter`: a multiply-add is two.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from firecaffe.models.kernel import (
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_1X1,
    CONVOLUTION_3X3,
    CONVOLUTION_LARGE,
    DEPTHWISE,
    ELEMENTWISE,
    GROUPED,
    MATRIX,
    MULTIPLIES,
    NORM,
    Kernel,
)

LARGE = 5
WIDE = 32
"""Channels of a group from which it is computed as a convolution of its own."""

_FREE = ("_unsafe_view", "_to_copy", "lift_fresh", "_reshape_alias")
_IN_FLOAT32 = ("softmax", "layer_norm", "group_norm", "pow", "exp", "log", "cumsum", "nll_loss")
"""Source: "CUDA Ops that can autocast to float32" in torch's page on automatic mixed precision."""
_RECURRENT = (nn.RNNBase,)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects kernels while it is active; `taken` returns those since its last call.

    fixed: parameters and buffers. inputs: the network's, whose gradients nobody wants.
    """

    def __init__(self, fixed: Collection[Tensor], inputs: Any, batch_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed = {id(tensor) for tensor in fixed}
        self._inputs = {id(leaf) for leaf in _tensors(inputs)}
        self._batch_size = batch_size
        self._kernels: list[Kernel] = []
        self._kept: list[Tensor] = []  # they must live as long as their ids are known

    def taken(self, part: nn.Module | None = None) -> tuple[Kernel, ...]:
        """Return the kernels of the call of `part`; libraries join those of some layers."""
        kernels, self._kernels = tuple(self._kernels), []
        if isinstance(part, _DROPOUT) and kernels:
            return (replace(kernels[0], moved=min(kernel.moved for kernel in kernels)),)
        return _joined(kernels) if isinstance(part, _RECURRENT) else kernels

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if self._is_view(func, given, result):
            # A reshaped or cast weight is a weight, and so are views of the network's inputs.
            for known in (self._fixed, self._inputs):
                if given and all(id(tensor) in known for tensor in given):
                    known.update(id(tensor) for tensor in _tensors(result))
                    self._kept.extend(_tensors(result))
            return result
        if any(id(tensor) not in self._fixed for tensor in given):
            self._kernels.append(self._kernel(func, args, kwargs, given, result))
        return result

    def _is_view(self, func: Any, given: Sequence[Tensor], result: Any) -> bool:
        name = func.overloadpacket.__name__
        if name in _FREE or name.startswith(("empty", "new_", "detach")):
            return True
        aliases = [of.alias_info for of in func._schema.returns]
        return any(alias is not None and not alias.is_write for alias in aliases)

    def _kernel(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> Kernel:
        packet, images = func.overloadpacket, self._batch_size
        name = packet.__name__
        made = _tensors(result)
        moving = [tensor for tensor in given if id(tensor) not in self._fixed]
        has_gradient = not moving or any(id(tensor) not in self._inputs for tensor in moving)
        kernel = Kernel(
            ELEMENTWISE,
            0.0,
            sum(tensor.numel() for tensor in (*moving, *made[:1])) / images,
            float(sum(tensor.numel() for tensor in given if id(tensor) in self._fixed)),
            has_input_gradient=has_gradient,
            in_float32=any(word in name for word in _IN_FLOAT32),
        )
        if packet in flop_registry:
            count: Callable[..., int] = flop_registry[packet]
            flops = count(*args, **kwargs, out_val=result) / images
            kernel = replace(
                kernel, flops=flops, **_shape(name, args, made, kernel.weights, images)
            )
        elif "_norm" in name and "vector" not in name and "linalg" not in name:
            kernel = replace(kernel, kind=NORM)
        return kernel


def _shape(
    name: str, args: tuple[Any, ...], made: Sequence[Tensor], weights: float, images: int
) -> dict[str, Any]:
    """Class and sizes of an operator that multiplies."""
    if "convolution" in name:
        return _shape_of_convolution(args, made, images)
    if "attention" in name:
        query = args[0]
        return {"kind": ATTENTION, "side": float(min(query.shape[-1], query.shape[-2]))}
    first, second = [leaf for leaf in args if isinstance(leaf, Tensor)][-2:]
    if weights:
        sides = (first.shape[-1], second.shape[-1])
        read = weights / (first.shape[0] if first.dim() > 2 else 1)  # one, repeated as a view
        rows = prod(first.shape[:-1]) / images
        return {"kind": MATRIX, "side": float(min(sides)), "rows": rows, "weights": read}
    # Matrices of one image each.
    sides = (*first.shape[-2:], second.shape[-1])
    return {"kind": ATTENTION, "side": float(min(sides))}


def _shape_of_convolution(
    args: tuple[Any, ...], made: Sequence[Tensor], images: int
) -> dict[str, Any]:
    weight, stride, dilation, is_transposed, groups = args[1], args[3], args[5], args[6], args[8]
    outputs = weight.shape[0] // (1 if is_transposed else groups)
    sides = (outputs, prod(weight.shape[1:]))
    kind = CONVOLUTION
    if groups > 1 and weight.shape[1] == 1:
        kind = DEPTHWISE
    elif groups > 1 and weight.shape[1] < WIDE:
        kind = GROUPED
    elif prod(weight.shape[2:]) == 1:
        kind = CONVOLUTION_1X1
    elif {*stride, *dilation} == {1} and tuple(weight.shape[2:]) == (3, 3):
        kind = CONVOLUTION_3X3
    elif {*stride, *dilation} == {1} and min(weight.shape[2:]) >= LARGE:
        kind = CONVOLUTION_LARGE
    rows = prod(made[0].shape[2:]) * made[0].shape[0] / images
    return {"kind": kind, "side": float(min(sides)), "rows": rows}


def _joined(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The matrices of a recurrent layer, whose library computes the rest inside of them.

    Each time step has kernels of its own. Their few rows do not limit them, and weights are read
    once: they stay in a cache or in registers from step to step.
    """
    multiplies = [kernel for kernel in kernels if kernel.kind in MULTIPLIES]
    steps = Counter(multiplies)
    joined = [
        replace(kernel, rows=0.0, weights=kernel.weights / steps[kernel]) for kernel in multiplies
    ]
    return tuple(joined) or tuple(kernels)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
