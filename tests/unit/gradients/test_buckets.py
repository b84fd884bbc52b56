"""Buckets: every tensor once, in order, in its own shape and memory layout."""

import pytest
import torch

from firecaffe.gradients.buckets import make_buckets, views_like


def tensors() -> list[torch.Tensor]:
    return [
        torch.zeros(3, 4),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(7),
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(()),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 50, 10_000])
@pytest.mark.parametrize("multiple", [1, 4, 7])
def test_every_tensor_lies_once_in_some_bucket(bucket_bytes: int, multiple: int) -> None:
    all_tensors, order = tensors(), [4, 2, 0, 1, 3]
    buckets = make_buckets(all_tensors, order, bucket_bytes, multiple)
    assert [member for bucket in buckets for member in bucket.members] == order
    for bucket in buckets:
        assert bucket.flat.numel() % multiple == 0
        used = sum(all_tensors[member].numel() for member in bucket.members)
        gaps = 15 * (len(bucket.members) - 1)
        assert 0 <= bucket.flat.numel() - used < multiple + gaps
        # Each view has its own elements: number them all, and no number is seen twice.
        bucket.flat.copy_(torch.arange(bucket.flat.numel()))
        seen = torch.cat([view.reshape(-1) for view in bucket.views])
        assert len(set(seen.tolist())) == used
        assert all(view.storage_offset() % 16 == 0 for view in bucket.views)
        for member, view in zip(bucket.members, bucket.views, strict=True):
            assert view.shape == all_tensors[member].shape
            assert view.stride() == all_tensors[member].stride()
            assert view.dtype == bucket.flat.dtype == all_tensors[member].dtype


def test_a_bucket_ends_where_it_is_full_or_the_type_changes() -> None:
    buckets = make_buckets(tensors(), [0, 1, 2, 3, 4], 48 + 480, 1)
    assert [bucket.members for bucket in buckets] == [(0, 1), (2,), (3,), (4,)]


def test_a_tensor_larger_than_a_bucket_gets_one_of_its_own() -> None:
    assert [b.members for b in make_buckets(tensors(), [0, 1, 2], 100, 1)] == [(0,), (1,), (2,)]


def test_a_view_of_a_tensor_with_gaps_is_dense() -> None:
    with_gaps = torch.zeros(4, 6)[:, ::2]
    (view,) = views_like(torch.arange(12.0), [with_gaps])
    assert view.shape == (4, 3)
    assert view.is_contiguous()
