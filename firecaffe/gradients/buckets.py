"""Buckets: flat vectors in which gradients travel, in the order backward makes them ready."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import Layout

ALIGNMENT = 16
"""Elements at whose multiples tensors begin in a bucket."""

FIRST_SHARE = 1 / 4
"""The first bucket's share of a bucket's bytes: until it is full the network is idle. The others
are larger, for messages take the processor from backward.
"""


@dataclass(frozen=True)
class Bucket:
    """One flat vector and its views in the shapes and memory layouts of its tensors."""

    members: tuple[int, ...]
    """The indices of the reducer's tensors that lie here, in order."""
    flat: Tensor
    views: tuple[Tensor, ...]

    def start(self, member: int) -> int:
        """The place at which one of the members begins in `flat`."""
        return int(self.views[self.members.index(member)].storage_offset())


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""(elements, dtype, device) -> a vector of zeros."""


def make_buckets(
    tensors: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    bucket_bytes: int,
    multiple: int,
    allocate: Allocate,
    alignment: int = ALIGNMENT,
) -> list[Bucket]:
    """Makes buckets of groups of tensors; see `members_of`."""
    return [
        make_bucket(tensors, members, multiple, allocate, alignment)
        for members in members_of(tensors, groups, bucket_bytes)
    ]


def members_of(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Cuts groups of tensors, each in the order given, into buckets, as `cut` does.

    A bucket ends with its group too, and before a tensor of another dtype or device.
    """
    alike = [
        list(run)
        for group in groups
        for _, run in groupby(
            group, key=lambda index: (tensors[index].dtype, tensors[index].device)
        )
    ]
    return [
        tuple(run[start:stop])
        for run in alike
        for start, stop in cut([tensors[index].nbytes for index in run], bucket_bytes)
    ]


def cut(tensors_bytes: Sequence[int], bucket_bytes: int) -> list[tuple[int, int]]:
    """Cuts tensors into buckets of consecutive ones: (the first, the one after the last) of each.

    A bucket is full once it holds `bucket_bytes`; the first, at FIRST_SHARE of that.
    """
    spans, start, held = [], 0, 0
    full = bucket_bytes * FIRST_SHARE
    for index, tensor_bytes in enumerate(tensors_bytes):
        held += tensor_bytes
        if held >= full or index == len(tensors_bytes) - 1:
            spans.append((start, index + 1))
            start, held, full = index + 1, 0, bucket_bytes
    return spans


def make_bucket(
    tensors: Sequence[Tensor],
    members: Sequence[int],
    multiple: int,
    allocate: Allocate,
    alignment: int,
) -> Bucket:
    """Makes one bucket, padded to a multiple of `multiple` elements, so that it can be cut into
    equal shards.
    """
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
    """The places at which tensors begin in a flat vector, and last the vector's end.

    Beginnings are aligned as an allocation is: on a GPU some kernels choose by alignment how they
    add, and a bucket's size must not change bits.
    """
    return places([tensor.numel() for tensor in tensors], alignment)


def places(sizes: Sequence[int], alignment: int = ALIGNMENT) -> list[int]:
    """The same of tensors of so many elements."""
    result, end = [], 0
    for size in sizes:
        begin = -(-end // alignment) * alignment
        result.append(begin)
        end = begin + size
    return [*result, end]


def layout_of(bucket: Bucket, names: Sequence[str]) -> Layout:
    """The layout of a bucket for a compressor; empty if the bucket holds no parameter."""
    members = [(m, v) for m, v in zip(bucket.members, bucket.views, strict=True) if m < len(names)]
    return Layout(
        names=tuple(names[member] for member, _ in members),
        spans=tuple((bucket.start(m), bucket.start(m) + v.numel()) for m, v in members),
        shapes=tuple(_shape_in_memory(view) for _, view in members),
    )


def _shape_in_memory(view: Tensor) -> tuple[int, ...]:
    """The sizes of the dimensions, from the slowest in memory to the fastest."""
    strides = view.stride()
    order = sorted(range(view.ndim), key=lambda dimension: (-strides[dimension], dimension))
    return tuple(view.shape[dimension] for dimension in order)
