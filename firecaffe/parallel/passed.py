"""What a stage passes to another one, as a text and runs of memory, and back.

A value is a tensor, a number, a text, None, or tuples, lists and dicts of these. The text is the
outline: where the tensors are in it, and the shape, strides and alignment of each. They arrive with
all three, for each may show in the bits of what is computed from them.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError

ALIGNMENT = 64
"""Bytes at whose multiples torch allocates on a CPU."""


class Packed(NamedTuple):
    """A value, ready to be sent."""

    outline: str
    runs: list[Tensor]
    """Of each tensor, the memory from its first element to its last, in one dimension."""


def pack(value: Any) -> Packed:
    """Packs a value. Its tensors' memory is not copied.

    Raises: RecipeError if it has something else in it.
    """
    tensors: list[Tensor] = []
    tree = _outline(value, tensors)
    return Packed(json.dumps([tree, [_form(tensor) for tensor in tensors]]), _runs(tensors))


def tensors_in(value: Any) -> list[Tensor]:
    """The different tensors in a value, in the order in which they are packed.

    Raises: RecipeError if it has something else in it.
    """
    tensors: list[Tensor] = []
    _outline(value, tensors)
    return tensors


def check_apart(tensors: Sequence[Tensor]) -> None:
    """Raises: RecipeError if two tensors share memory: they would not after they were sent, and a
    change of one in place would be lost for the other.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if len({tensor.untyped_storage().data_ptr() for tensor in filled}) < len(filled):
        raise RecipeError(
            "stages: two tensors that share memory go from one stage to the next; let the next one "
            "begin earlier or later"
        )


def room_for(outline: str) -> list[Tensor]:
    """Memory for the runs of an outline."""
    _, forms = json.loads(outline)
    made = []
    for dtype, shape, strides, lead, _ in forms:
        length = _span(shape, strides)
        made.append(torch.empty(lead + length, dtype=getattr(torch, dtype))[lead:])
    return made


def unpack(outline: str, runs: Sequence[Tensor], device: torch.device) -> tuple[Any, list[Tensor]]:
    """The value, and those of its tensors whose gradients are wanted back, in the order of
    `tensors_in`.
    """
    tree, forms = json.loads(outline)
    tensors, wanted = [], []
    for (_, shape, strides, _, wants), arrived in zip(forms, runs, strict=True):
        run = arrived.to(device)
        # .data: autograd is to see a tensor of its own, which may be changed in place.
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
        return {kind: [_outline(each, tensors) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _outline(each, tensors) for key, each in value.items()}}
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
        return {key: _value(each, tensors) for key, each in content.items()}
    return (list if kind == "list" else tuple)(_value(each, tensors) for each in content)


def _form(tensor: Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    lead = tensor.data_ptr() % ALIGNMENT // tensor.itemsize
    return [dtype, list(tensor.shape), list(tensor.stride()), lead, tensor.requires_grad]


def _runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.as_strided(each.detach(), (_span(each.shape, each.stride()),), (1,))
        for each in tensors
    ]


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The elements of memory from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
