"""Buckets: every tensor once, in order, in its own shape and memory layout."""

import pytest
import torch

from firecaffe.gradients.buckets import cut, layout_of, make_buckets, views_like


def tensors() -> list[torch.Tensor]:
    return [
        torch.zeros(3, 4),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(7),
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(()),
    ]


def new_vector(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_elements, dtype=dtype, device=device)


@pytest.mark.parametrize("bucket_bytes", [1, 50, 10_000])
@pytest.mark.parametrize("multiple", [1, 4, 7])
def test_every_tensor_lies_once_in_some_bucket(bucket_bytes: int, multiple: int) -> None:
    all_tensors, order = tensors(), [4, 2, 0, 1, 3]
    buckets = make_buckets(all_tensors, [order], bucket_bytes, multiple, new_vector)
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


@pytest.mark.parametrize(
    ("tensors_bytes", "bucket_bytes", "spans"),
    [
        ([], 8, []),
        ([2, 4, 4, 4, 4], 8, [(0, 1), (1, 3), (3, 5)]),  # the first is full at a quarter
        ([1, 1, 4, 4], 8, [(0, 2), (2, 4)]),
        ([1, 100, 4, 100, 4], 8, [(0, 2), (2, 4), (4, 5)]),  # what fills it may be long
        ([4, 4], 1, [(0, 1), (1, 2)]),
        ([3, 7], 100, [(0, 2)]),
    ],
)
def test_a_bucket_ends_where_it_is_full(
    tensors_bytes: list[int], bucket_bytes: int, spans: list[tuple[int, int]]
) -> None:
    assert cut(tensors_bytes, bucket_bytes) == spans


def test_a_bucket_ends_where_the_type_changes() -> None:
    buckets = make_buckets(tensors(), [[0, 1, 2, 3, 4]], 10_000, 1, new_vector)
    assert [bucket.members for bucket in buckets] == [(0, 1, 2), (3,), (4,)]


def test_a_bucket_ends_with_its_group() -> None:
    buckets = make_buckets(tensors(), [[0, 1], [2]], 10_000, 1, new_vector)
    assert [bucket.members for bucket in buckets] == [(0, 1), (2,)]


def test_a_layout_says_where_in_memory_and_in_which_order_of_dimensions() -> None:
    [bucket] = make_buckets(tensors(), [[0, 1, 4]], 10_000, 256, new_vector, alignment=256)
    layout = layout_of(bucket, ["a", "b"])  # number 4 is no parameter
    assert layout.names == ("a", "b")
    assert layout.spans == ((0, 12), (256, 256 + 120))
    assert layout.shapes == ((3, 4), (2, 4, 5, 3))


def test_a_view_of_a_tensor_with_gaps_is_dense() -> None:
    with_gaps = torch.zeros(4, 6)[:, ::2]
    (view,) = views_like(torch.arange(12.0), [with_gaps])
    assert view.shape == (4, 3)
    assert view.is_contiguous()
