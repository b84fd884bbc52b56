"""Counts what autograd saves for backward, by layer, in a forward pass that may be of shapes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from firecaffe.meta_kernels import without_compiler
from firecaffe.models.layer_costs import in_training, layers_in, shadows_of


def saved_bytes(network: nn.Module, inputs: Any) -> dict[str, int]:
    """Count the bytes of tensors that backward needs, by the layer that first saves them.

    Each memory counts once, so a ReLU in place shares its output with the convolution behind it.
    Weights and buffers do not count. Names are those of `Profile.layers`; what functions save
    belongs to the layer before them. The network stays as it is.
    """
    shadows = shadows_of(network, tree_leaves(inputs)[0].device)
    known = {_memory(tensor) for tensor in shadows.values()}
    kept: list[Tensor] = []  # they must live as long as their memory is known
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
    handles = [
        part.register_forward_pre_hook(partial(begin, names[part])) for part in layers_in(network)
    ]
    try:
        with (
            in_training(network),
            torch.enable_grad(),
            without_compiler(),
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            functional_call(network, shadows, (inputs,))
    finally:
        for handle in handles:
            handle.remove()
    return saved


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
