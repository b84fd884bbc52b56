"""Buckets: flat vectors in which gradients travel, in the order backward makes them ready."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firecaffe.gradients.compressors.wire import Layout

ALIGNMENT = 16
"""Elements."""


@dataclass(frozen=True)
class Bucket:
    """One flat vector and its views in the shapes and memory layouts of its tensors."""

    members: tuple[int, ...]
    """Which of the reducer's tensors lie here, in order."""
    flat: Tensor
    views: tuple[Tensor, ...]

    def start(self, member: int) -> int:
        """Where one of the members begins in `flat`."""
        return int(self.views[self.members.index(member)].storage_offset())


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(elements, dtype, device) to a vector of zeros."""


def make_buckets(
    tensors: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    bucket_bytes: int,
    multiple: int,
    allocate: Allocate,
    alignment: int = ALIGNMENT,
) -> list[Bucket]:
    """Cuts groups of tensors, each in the order given, into buckets of about `bucket_bytes`.

    A bucket ends with its group, where it is full, or where dtype or device change. Its length is
    padded to a multiple of `multiple` elements, so that it can be cut into equal shards.
    """
    cut: list[list[int]] = []
    for group in groups:
        filled_bytes = 0
        last: Tensor | None = None
        for index in group:
            tensor = tensors[index]
            fits = last is not None and (last.dtype, last.device) == (tensor.dtype, tensor.device)
            if not fits or filled_bytes + tensor.nbytes > bucket_bytes:
                cut.append([])
                filled_bytes = 0
            cut[-1].append(index)
            filled_bytes += tensor.nbytes
            last = tensor
    return [_make_bucket(tensors, members, multiple, allocate, alignment) for members in cut]


def _make_bucket(
    tensors: Sequence[Tensor],
    members: Sequence[int],
    multiple: int,
    allocate: Allocate,
    alignment: int,
) -> Bucket:
    own = [tensors[index] for index in members]
    padded = -(-offsets(own, alignment)[-1] // multiple) * multiple
    flat = allocate(padded, own[0].dtype, own[0].device)
    return Bucket(tuple(members), flat, views_like(flat, own, alignment))


def views_like(
    flat: Tensor, tensors: Sequence[Tensor], alignment: int = ALIGNMENT
) -> tuple[Tensor, ...]:
    """Parts of a flat vector, each with the shape and the strides of its tensor, as `offsets`."""
    views = []
    for tensor, offset in zip(tensors, offsets(tensors, alignment), strict=False):
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            view = torch.as_strided(flat, tensor.shape, tensor.stride(), offset)
        else:
            view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        views.append(view)
    return tuple(views)


def offsets(tensors: Sequence[Tensor], alignment: int = ALIGNMENT) -> list[int]:
    """Where each tensor begins in a flat vector, and last where the vector ends.

    Beginnings are aligned as an allocation is: on a GPU some kernels choose by alignment how they
    add, and a bucket's size must not change bits.
    """
    result, end = [], 0
    for tensor in tensors:
        begin = -(-end // alignment) * alignment
        result.append(begin)
        end = begin + tensor.numel()
    return [*result, end]


def layout_of(bucket: Bucket, names: Sequence[str]) -> Layout:
    """What a compressor is told of a bucket; nothing of one that holds no parameter."""
    members = [(m, v) for m, v in zip(bucket.members, bucket.views, strict=True) if m < len(names)]
    return Layout(
        names=tuple(names[member] for member, _ in members),
        spans=tuple((bucket.start(m), bucket.start(m) + v.numel()) for m, v in members),
        shapes=tuple(_shape_in_memory(view) for _, view in members),
    )


def _shape_in_memory(view: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest."""
    strides = view.stride()
    order = sorted(range(view.ndim), key=lambda dimension: (-strides[dimension], dimension))
    return tuple(view.shape[dimension] for dimension in order)
