"""Data volumes and arithmetic of one step of a network, by layer, and the tensors autograd saves.

|W| is what an exchange of gradients carries, D what an exchange of activations would carry. Their
ratio tells which to exchange. D is the bytes of the *inputs* of all convolutions and fully
connected layers; this definition gives the paper's figures.

Kernels are torch operators on the meta device, so functions count like modules: residual
additions, attention, a softmax. An operator that only makes a view has no kernel. Operations are
counted by `torch.utils.flop_counter`: a multiply-add is two.

Source: Iandola et al. 2016 (FireCaffe, arXiv 1511.00175).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from firecaffe.meta_kernels import without_compiler
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

_COUNTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)

LARGE = 5
WIDE = 32
"""Channels per group from which each group is computed as a separate convolution."""

_FREE = ("_unsafe_view", "_to_copy", "lift_fresh", "_reshape_alias")
_IN_FLOAT32 = ("softmax", "layer_norm", "group_norm", "pow", "exp", "log", "cumsum", "nll_loss")
"""Source: "CUDA Ops that can autocast to float32" in torch's page on automatic mixed precision."""
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects kernels. `fixed`: parameters and buffers. `inputs`: what needs no gradients."""

    def __init__(self, fixed: Collection[Tensor], inputs: Any, batch_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed = {id(tensor) for tensor in fixed}
        self._inputs = {id(leaf) for leaf in _tensors(inputs)}
        self._batch_size = batch_size
        self._kernels: list[Kernel] = []
        self._kept: list[Tensor] = []  # keeps their ids from being reused

    def taken(self, part: nn.Module | None = None) -> tuple[Kernel, ...]:
        """Return the kernels of a call of `part`, joined if libraries fuse those of its type."""
        kernels, self._kernels = tuple(self._kernels), []
        if isinstance(part, _DROPOUT) and kernels:
            return (replace(kernels[0], moved=min(kernel.moved for kernel in kernels)),)
        return _joined(kernels) if isinstance(part, nn.RNNBase) else kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        if self._is_view(func, given, result):
            # A reshaped or cast weight is still a weight; the same holds for the network's inputs.
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
    if "convolution" in name:
        return _shape_of_convolution(args, made, images)
    if "attention" in name:
        query = args[0]
        return {"kind": ATTENTION, "side": float(min(query.shape[-1], query.shape[-2]))}
    first, second = [leaf for leaf in args if isinstance(leaf, Tensor)][-2:]
    if weights:
        side = float(min(first.shape[-1], second.shape[-1]))
        read = weights / (first.shape[0] if first.dim() > 2 else 1)  # one, repeated by a view
        rows = prod(first.shape[:-1]) / images
        return {"kind": MATRIX, "side": side, "rows": rows, "weights": read}
    # Each matrix belongs to one image.
    return {"kind": ATTENTION, "side": float(min(*first.shape[-2:], second.shape[-1]))}


def _shape_of_convolution(
    args: tuple[Any, ...], made: Sequence[Tensor], images: int
) -> dict[str, Any]:
    weight, stride, dilation, is_transposed, groups = args[1], args[3], args[5], args[6], args[8]
    outputs = weight.shape[0] // (1 if is_transposed else groups)
    side = float(min(outputs, prod(weight.shape[1:])))
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
    return {"kind": kind, "side": side, "rows": rows}


def _joined(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return a recurrent layer's matrix kernels, one for each time step; others are fused in them.

    Their few rows do not limit them, and weights are read once: they stay in a cache.
    """
    multiplies = [kernel for kernel in kernels if kernel.kind in MULTIPLIES]
    steps = Counter(multiplies)
    joined = [
        replace(kernel, rows=0.0, weights=kernel.weights / steps[kernel]) for kernel in multiplies
    ]
    return tuple(joined) or tuple(kernels)


@dataclass(frozen=True)
class LayerProfile:
    """One call of one layer, for the whole batch.

    A parameter counts in the first row that uses it, so layers called twice (`relu#2`) and tied
    weights count once. macs and forward_backward_flops are those of convolutions and fully
    connected layers without the bias; other layers have 0 by definition.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...]
    parameters: int
    weight_bytes: int
    input_activation_bytes: int
    output_activation_bytes: int
    macs: int
    forward_backward_flops: int
    kernels: tuple[Kernel, ...] = ()
    """The kernels of this call, and of functions between it and the next row's call."""


@dataclass(frozen=True)
class Profile:
    """A network at one batch size, with totals for one step of the whole batch.

    weight_bytes is |W|, each parameter once; data_bytes is D; forward_backward_flops is 6 x MAC: a
    multiply and an add, for the forward, for the inputs and for the weights.
    """

    batch_size: int
    input_CHW: tuple[int, ...]
    layers: tuple[LayerProfile, ...]
    parameters: int
    weight_bytes: int
    data_bytes: int
    macs: int
    forward_backward_flops: int

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for row in values["layers"]:
            del row["kernels"]
        return values


def profile(module: nn.Module, input_CHW: tuple[int, int, int], batch_size: int) -> Profile:
    """Run `module` on images of its dtype, without using memory; see `profile_on`."""
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    dtype = next(floats, torch.get_default_dtype())
    return profile_on(module, torch.zeros(batch_size, *input_CHW, dtype=dtype, device="meta"))


def profile_on(module: nn.Module, inputs: Any) -> Profile:
    """Run `module` once in training mode, so that auxiliary heads count, and leave it unchanged.

    Layers that the forward does not call have no row, but count in the totals, since they are
    exchanged. `inputs` is a tensor or a tree of tensors with a row per sample. `module` runs on
    their device: "meta" uses no memory; code that reads values needs another device.
    """
    first = tree_leaves(inputs)[0]
    batch_size, device = len(first), first.device
    parameters = list(module.parameters())
    shadows = shadows_of(module, device)

    rows: list[LayerProfile] = []
    recorder = KernelRecorder(shadows.values(), inputs, batch_size)
    with (
        in_training(module),
        _recording(module, rows, recorder),
        torch.no_grad(),
        without_compiler(),
        recorder,
    ):
        functional_call(module, shadows, (inputs,))
    if rows:
        rows[-1] = replace(rows[-1], kernels=(*rows[-1].kernels, *recorder.taken()))
    return Profile(
        batch_size=batch_size,
        input_CHW=tuple(first.shape[1:]),
        layers=tuple(rows),
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.nbytes for p in parameters),
        data_bytes=sum(row.input_activation_bytes for row in rows if row.macs),
        macs=sum(row.macs for row in rows),
        forward_backward_flops=sum(row.forward_backward_flops for row in rows),
    )


def layers_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules that have no children, or have parameters themselves."""
    return [
        part
        for part in module.modules()
        if next(part.parameters(recurse=False), None) is not None
        or next(part.children(), None) is None
    ]


def shadows_of(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return stand-ins for a network's tensors in `functional_call`; buffers are copied."""
    shadows = {
        name: p.detach().to(device).requires_grad_(p.requires_grad)
        for name, p in module.named_parameters()
    }
    return shadows | {name: b.to(device, copy=True) for name, b in module.named_buffers()}


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    before = {part: part.training for part in module.modules()}
    module.train()
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


@contextmanager
def _recording(
    module: nn.Module, rows: list[LayerProfile], recorder: KernelRecorder
) -> Iterator[None]:
    names = {part: name for name, part in module.named_modules()}
    # Listed now, since other tensors replace the parameters during the call.
    parameters_of = {part: list(part.parameters(recurse=False)) for part in layers_in(module)}
    calls: dict[nn.Module, int] = {}
    seen: set[int] = set()

    def record(part: nn.Module, inputs: Any, output: Any) -> None:
        calls[part] = calls.get(part, 0) + 1
        new = [p for p in parameters_of[part] if id(p) not in seen]
        seen.update(id(p) for p in new)
        # One output element sums as many products as one filter has weights.
        macs = output.numel() * part.weight[0].numel() if isinstance(part, _COUNTED) else 0
        tensors = _tensors(output)
        rows.append(
            LayerProfile(
                name=names[part] if calls[part] == 1 else f"{names[part]}#{calls[part]}",
                kind=part._get_name(),  # type: ignore[no-untyped-call]
                output_shape=tuple(tensors[0].shape) if tensors else (),
                parameters=sum(p.numel() for p in new),
                weight_bytes=sum(p.nbytes for p in new),
                input_activation_bytes=sum(t.nbytes for t in _tensors(inputs)),
                output_activation_bytes=sum(t.nbytes for t in tensors),
                macs=macs,
                forward_backward_flops=6 * macs,
                kernels=recorder.taken(part),
            )
        )

    def begin(part: nn.Module, inputs: Any) -> None:
        between = recorder.taken()
        if rows:
            rows[-1] = replace(rows[-1], kernels=(*rows[-1].kernels, *between))

    with ExitStack() as hooks:
        for part in parameters_of:
            hooks.enter_context(part.register_forward_hook(record))
            hooks.enter_context(part.register_forward_pre_hook(begin))
        yield


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def saved_bytes(network: nn.Module, inputs: Any) -> dict[str, int]:
    """Count the bytes of tensors that backward needs, by the layer that first saves them.

    Each storage counts once, so an in-place ReLU shares its output with the convolution after it.
    Weights and buffers do not count. Names are those of `Profile.layers`; tensors that functions
    save count for the layer before them. The network does not change.
    """
    shadows = shadows_of(network, tree_leaves(inputs)[0].device)
    known = {_memory(tensor) for tensor in shadows.values()}
    kept: list[Tensor] = []  # keeps their storages from being reused
    saved, calls = {"": 0}, dict[str, int]()

    def begin(name: str, *_: Any) -> None:
        calls[name] = calls.get(name, 0) + 1
        saved[name if calls[name] == 1 else f"{name}#{calls[name]}"] = 0

    def pack(tensor: Tensor) -> Tensor:
        if _memory(tensor) not in known:
            known.add(_memory(tensor))
            kept.append(tensor.detach())
            saved[next(reversed(saved))] += tensor.untyped_storage().nbytes()
        return tensor

    names = {part: name for name, part in network.named_modules()}
    with (
        ExitStack() as hooks,
        in_training(network),
        torch.enable_grad(),
        without_compiler(),
        saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        for part in layers_in(network):
            hooks.enter_context(part.register_forward_pre_hook(partial(begin, names[part])))
        functional_call(network, shadows, (inputs,))
    return saved


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
