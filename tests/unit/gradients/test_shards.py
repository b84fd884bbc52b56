"""Buckets: every tensor once, in order, in its own shape and memory layout. Shards: every row of
every parameter once, as equal as rows or whole parameters allow.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from firecaffe.gradients.buckets import cut, layout_of, make_buckets, views_like
from firecaffe.gradients.shards import Shards, cut_buckets, held_elements, make_shards, spans_of


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


def test_a_bucket_ends_where_the_type_changes_and_with_its_group() -> None:
    buckets = make_buckets(tensors(), [[0, 1, 2, 3, 4]], 10_000, 1, new_vector)
    assert [bucket.members for bucket in buckets] == [(0, 1, 2), (3,), (4,)]
    buckets = make_buckets(tensors(), [[0, 1], [2]], 10_000, 1, new_vector)
    assert [bucket.members for bucket in buckets] == [(0, 1), (2,)]


def test_a_layout_says_where_in_memory_and_in_which_order_of_dimensions() -> None:
    [bucket] = make_buckets(tensors(), [[0, 1, 4]], 10_000, 256, new_vector, alignment=256)
    layout = layout_of(bucket, ["a", "b"])  # number 4 is no parameter
    assert layout.names == ("a", "b")
    assert layout.spans == ((0, 12), (256, 256 + 120))
    assert layout.shapes == ((3, 4), (2, 4, 5, 3))
    with_gaps = torch.zeros(4, 6)[:, ::2]
    (view,) = views_like(torch.arange(12.0), [with_gaps])
    assert view.shape == (4, 3)
    assert view.is_contiguous()


ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=6)


@settings(max_examples=200)
@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(1, 6))
def test_each_bucket_is_cut_between_rows(rows: list[list[tuple[int, int]]], parts: int) -> None:
    buckets, ends = zip(*(spans_of(each) for each in rows), strict=True)
    held = [0] * parts
    for spans, end, cuts in zip(buckets, ends, cut_buckets(buckets, ends, parts), strict=True):
        assert (cuts[0], cuts[-1], len(cuts)) == (0, end, parts + 1)
        assert list(cuts) == sorted(cuts)
        places = {s.start + row * s.row for s in spans for row in range(s.rows)} | {end}
        assert set(cuts) <= places
        own = held_elements(spans, cuts)
        assert sum(own) == sum(span.rows * span.row for span in spans)
        held = [a + b for a, b in zip(held, own, strict=True)]


def test_what_a_large_bucket_lacks_smaller_ones_make_up() -> None:
    """Three tensors for two ranks: the largest is one rank's, the others the other's."""
    buckets, ends = zip(*(spans_of([(1, size)]) for size in (30, 100, 60)), strict=True)
    assert cut_buckets(buckets, ends, 2) in (
        [(0, 0, 30), (0, 100, 100), (0, 0, 60)],
        [(0, 30, 30), (0, 0, 100), (0, 60, 60)],
    )
    # Rows of 1: as equal as can be, in each bucket.
    buckets, ends = zip(*(spans_of([(size, 1)]) for size in (99, 60, 31)), strict=True)
    assert [cuts[1] for cuts in cut_buckets(buckets, ends, 2)] == [49, 30, 16]


def parameters() -> dict[str, nn.Parameter]:
    images = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = {
        "weight": torch.arange(35.0).view(7, 5),
        "images": images,
        "turned": torch.arange(20.0).view(4, 5).t(),
        "one": torch.tensor(3.0),
        "none": torch.zeros(3, 0),
        "double": torch.arange(5, dtype=torch.float64),
    }
    return {name: nn.Parameter(each) for name, each in tensors.items()}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 10_000])
def test_own_parts_are_views_and_together_all(whole: bool, bucket_bytes: int) -> None:
    named, order = parameters(), [3, 1, 0, 2, 5, 4]
    of_ranks = [make_shards(named, order, bucket_bytes, 3, rank, whole) for rank in range(3)]
    with torch.no_grad():
        for shards in of_ranks:
            for each in shards.own.values():
                each.add_(1000)
    for name, before in parameters().items():
        assert named[name].equal(before + 1000), name
        owners = [shards for shards in of_ranks if name in shards.own]
        assert len(owners) >= 1
        is_whole = whole or name in ("turned", "one", "none")
        assert len(owners) == 1 or not is_whole
        for shards in owners:
            own = shards.own_part(name, named[name])
            assert own.data_ptr() == shards.own[name].data_ptr()
            assert own.shape == shards.own[name].shape
    assert {name for shards in of_ranks for name in shards.own} == set(named)


def test_shards_in_a_bucket_are_the_rows() -> None:
    """The elements of a shard of a bucket are those of the owner's rows, whatever strides are."""
    named = {n: each for n, each in parameters().items() if n in ("weight", "images")}
    shards: list[Shards] = [make_shards(named, [0, 1], 10_000, 3, r, False) for r in range(3)]
    [(members, cuts)] = shards[0].cuts.items()
    assert members == (0, 1)
    flat = torch.full((48 + 120,), -1.0)
    flat[:35] = named["weight"].detach().flatten()
    flat[48:] = named["images"].detach().permute(0, 2, 3, 1).flatten()
    for own, (start, stop) in zip(shards, pairwise(cuts), strict=True):
        assert own.in_bucket(members) == slice(start, stop)
        found = sorted(x for each in own.own.values() for x in each.detach().flatten().tolist())
        assert found == sorted(x for x in flat[start:stop].tolist() if x >= 0)


def test_buckets_are_those_of_the_reducer() -> None:
    named = parameters()
    del named["double"]  # it has a bucket of its own
    shards = make_shards(named, [0, 1, 2, 3, 4], 300, 2, 0, False)
    sizes = [each.nbytes for each in named.values()]
    assert [*shards.cuts] == [tuple(range(*span)) for span in cut(sizes, 300)]
