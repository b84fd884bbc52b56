"""Flat vectors, called buckets, in which gradients travel in the order backward finishes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from firecaffe.gradients.compressors.codec import BucketLayout

ALIGNMENT = 16
"""Every tensor begins in its bucket at a multiple of this number of elements."""

# The network is idle until the first bucket is full. The others are larger because messages take
# processor time from backward.
FIRST_SHARE = 1 / 4
"""The first bucket is full at this share of `bucket_bytes`."""


@dataclass(frozen=True)
class Bucket:
    """One flat vector and views of it with the shapes and memory layouts of its tensors."""

    members: tuple[int, ...]
    """The indices of the reducer's tensors in this bucket, in order."""
    flat: Tensor
    views: tuple[Tensor, ...]

    def start(self, member: int) -> int:
        return int(self.views[self.members.index(member)].storage_offset())


Leaf = list[Tensor]
"""The tensors of one micro-batch, or their sums in a node of the tree."""

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]


def add_leaf(left: Leaf, right: Leaf) -> Leaf:
    torch._foreach_add_(left, right)
    return left


def make_buckets(
    tensors: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    bucket_bytes: int,
    multiple: int,
    allocate: Allocate,
    alignment: int = ALIGNMENT,
) -> list[Bucket]:
    return [
        make_bucket(tensors, members, multiple, allocate, alignment)
        for members in members_of(tensors, groups, bucket_bytes)
    ]


def members_of(
    tensors: Sequence[Tensor], groups: Sequence[Sequence[int]], bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Cut each group into buckets by `cut`. A bucket ends where the group, dtype or device ends."""
    runs = [
        list(run)
        for group in groups
        for _, run in groupby(
            group, key=lambda index: (tensors[index].dtype, tensors[index].device)
        )
    ]
    return [
        tuple(run[start:stop])
        for run in runs
        for start, stop in cut([tensors[index].nbytes for index in run], bucket_bytes)
    ]


def cut(tensors_bytes: Sequence[int], bucket_bytes: int) -> list[tuple[int, int]]:
    """Cut consecutive tensors into full buckets; return (first, one after the last) for each."""
    spans, start, held = [], 0, 0
    full = bucket_bytes * FIRST_SHARE
    for index, tensor_bytes in enumerate(tensors_bytes):
        held += tensor_bytes
        if held >= full or index == len(tensors_bytes) - 1:
            spans.append((start, index + 1))
            start, held, full = index + 1, 0, bucket_bytes
    return spans


def with_early_tails(buckets: Sequence[Bucket], num_parameters: int) -> list[Bucket]:
    """Return buckets with those of tails before the last one of gradients.

    Tails are ready together with the last gradients. Sent after them, the few bytes of a tail would
    wait in the network's queues.
    """
    tails = [bucket for bucket in buckets if bucket.members[0] >= num_parameters]
    others = [bucket for bucket in buckets if bucket.members[0] < num_parameters]
    return [*others[:-1], *tails, *others[-1:]]  # a stage may have no gradient


def make_bucket(
    tensors: Sequence[Tensor],
    members: Sequence[int],
    multiple: int,
    allocate: Allocate,
    alignment: int,
) -> Bucket:
    """Make one bucket, padded to a multiple of `multiple` elements so that equal shards fit."""
    bucket_tensors = [tensors[index] for index in members]
    padded = -(-offsets(bucket_tensors, alignment)[-1] // multiple) * multiple
    flat = allocate(padded, bucket_tensors[0].dtype, bucket_tensors[0].device)
    return Bucket(tuple(members), flat, views_like(flat, bucket_tensors, alignment))


def views_like(
    flat: Tensor, tensors: Sequence[Tensor], alignment: int = ALIGNMENT
) -> tuple[Tensor, ...]:
    """Return views of a flat vector with the tensors' shapes and strides, placed by `offsets`."""
    views = []
    for tensor, offset in zip(tensors, offsets(tensors, alignment), strict=False):
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            view = torch.as_strided(flat, tensor.shape, tensor.stride(), offset)
        else:
            view = flat[offset : offset + tensor.numel()].view(tensor.shape)
        views.append(view)
    return tuple(views)


def offsets(tensors: Sequence[Tensor], alignment: int = ALIGNMENT) -> list[int]:
    """Return where each tensor begins in a flat vector, followed by the end of the vector."""
    # Some GPU kernels choose by alignment in which order they add. So tensors are aligned as in an
    # allocation of their own, and the bucket size does not change bits.
    return places([tensor.numel() for tensor in tensors], alignment)


def places(sizes: Sequence[int], alignment: int = ALIGNMENT) -> list[int]:
    result, end = [], 0
    for size in sizes:
        begin = -(-end // alignment) * alignment
        result.append(begin)
        end = begin + size
    return [*result, end]


def layout_of(bucket: Bucket, names: Sequence[str]) -> BucketLayout:
    """Return a bucket's layout for a compressor; it is empty if the bucket holds no parameter."""
    members = [(m, v) for m, v in zip(bucket.members, bucket.views, strict=True) if m < len(names)]
    return BucketLayout(
        names=tuple(names[member] for member, _ in members),
        spans=tuple((bucket.start(m), bucket.start(m) + v.numel()) for m, v in members),
        shapes=tuple(_shape_in_memory(view) for _, view in members),
    )


def _shape_in_memory(view: Tensor) -> tuple[int, ...]:
    strides = view.stride()
    order = sorted(range(view.ndim), key=lambda dimension: (-strides[dimension], dimension))
    return tuple(view.shape[dimension] for dimension in order)
