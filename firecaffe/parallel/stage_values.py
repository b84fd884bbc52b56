"""Packs the values that stages pass on into a text and runs of memory, and unpacks them.

A value is a tensor, a number, a text, None, or tuples, lists and dicts of these. The text is the
outline: the places of tensors, and the shape, strides and alignment of each. Tensors arrive with
all three, because each may change the bits of what is computed from them.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError

ALIGNMENT = 64  # bytes; torch's on a CPU


class Packed(NamedTuple):
    outline: str
    runs: list[Tensor]
    """The memory of each tensor from its first element to its last, in one dimension."""


def pack(value: Any) -> Packed:
    """Pack a value without copying its tensors. Raises: RecipeError if it has other contents."""
    tensors: list[Tensor] = []
    tree = _outline(value, tensors)
    runs = [
        torch.as_strided(tensor.detach(), (_span(tensor.shape, tensor.stride()),), (1,))
        for tensor in tensors
    ]
    return Packed(json.dumps([tree, [_form(tensor) for tensor in tensors]]), runs)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the distinct tensors of a value in packing order. Raises: RecipeError as `pack`."""
    tensors: list[Tensor] = []
    _outline(value, tensors)
    return tensors


def check_no_alias(tensors: Sequence[Tensor]) -> None:
    """Check that tensors share no memory, which sending would separate. Raises: RecipeError."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if len({tensor.untyped_storage().data_ptr() for tensor in filled}) < len(filled):
        raise RecipeError(
            "stages: two tensors that share memory go from one stage to the next; let the next one "
            "begin earlier or later"
        )


def room_for(outline: str) -> list[Tensor]:
    _, forms = json.loads(outline)
    made = []
    for dtype, shape, strides, lead, _ in forms:
        length = _span(shape, strides)
        made.append(torch.empty(lead + length, dtype=getattr(torch, dtype))[lead:])
    return made


def unpack(outline: str, runs: Sequence[Tensor], device: torch.device) -> tuple[Any, list[Tensor]]:
    """Return the value, and its tensors that need gradients, in the order of `tensors_in`."""
    tree, forms = json.loads(outline)
    tensors, wanted = [], []
    for (_, shape, strides, _, wants), arrived in zip(forms, runs, strict=True):
        run = arrived.to(device)
        # With .data, autograd sees a separate tensor, which may be changed in place.
        tensor = torch.as_strided(run, shape, strides, run.storage_offset()).data
        tensors.append(tensor)
        if wants:
            wanted.append(tensor)
    return _value(tree, tensors), wanted


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided:
        for place, known in enumerate(tensors):
            if known is value:
                return {"tensor": place}
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list, torch.Size):
        kind = "list" if type(value) is list else "tuple"
        return {kind: [_outline(item, tensors) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _outline(item, tensors) for key, item in value.items()}}
    raise RecipeError(
        f"stages: a {type(value).__name__} goes from one stage to the next; it must be a tensor, a "
        "number, or a tuple, list or dict of these: let the next stage begin elsewhere"
    )


def _value(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _value(item, tensors) for key, item in content.items()}
    return (list if kind == "list" else tuple)(_value(item, tensors) for item in content)


def _form(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    lead = tensor.data_ptr() % ALIGNMENT // tensor.itemsize
    return [dtype, list(tensor.shape), list(tensor.stride()), lead, tensor.requires_grad]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
