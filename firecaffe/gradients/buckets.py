"""Buckets: flat vectors in which gradients travel, in the order backward makes them ready."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Elements."""


@dataclass(frozen=True)
class Bucket:
    """One flat vector and its views in the shapes and memory layouts of its tensors."""

    members: tuple[int, ...]
    """Which of the reducer's tensors lie here, in order."""
    flat: Tensor
    views: tuple[Tensor, ...]


def make_buckets(
    tensors: Sequence[Tensor], order: Sequence[int], bucket_bytes: int, multiple: int
) -> list[Bucket]:
    """Cuts the tensors, taken in `order`, into buckets of about `bucket_bytes`.

    A bucket ends where it is full or where dtype or device change. Its length is padded to a
    multiple of `multiple` elements, so that it can be cut into equal shards.
    """
    groups: list[list[int]] = []
    filled_bytes = 0
    for index in order:
        tensor = tensors[index]
        last = tensors[groups[-1][-1]] if groups else None
        fits = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        if not fits or filled_bytes + tensor.nbytes > bucket_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(index)
        filled_bytes += tensor.nbytes
    return [_make_bucket(tensors, group, multiple) for group in groups]


def _make_bucket(tensors: Sequence[Tensor], members: Sequence[int], multiple: int) -> Bucket:
    padded = -(-offsets([tensors[i] for i in members])[-1] // multiple) * multiple
    flat = torch.zeros(padded, dtype=tensors[members[0]].dtype, device=tensors[members[0]].device)
    return Bucket(tuple(members), flat, views_like(flat, [tensors[i] for i in members]))


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Parts of a flat vector, each with the shape and the strides of its tensor, as `offsets`."""
    views = []
    for tensor, offset in zip(tensors, offsets(tensors), strict=False):
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            view = torch.as_strided(flat, tensor.shape, tensor.stride(), offset)
        else:
            view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        views.append(view)
    return tuple(views)


def offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in a flat vector, and last where the vector ends.

    Beginnings are aligned as an allocation is: on a GPU some kernels choose by alignment how they
    add, and a bucket's size must not change bits.
    """
    result, end = [], 0
    for tensor in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        result.append(begin)
        end = begin + tensor.numel()
    return [*result, end]
