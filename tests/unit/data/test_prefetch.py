"""Batches ahead: the same batches, in order, each made once; errors and ends in their place."""

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset, open_data
from firecaffe.data.augment import AUGMENTS
from firecaffe.data.image_batches import FETCH
from firecaffe.data.prefetch import FEWEST, MOST, ahead
from firecaffe.data.sample_order import epoch_order, epoch_order_by_shard
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.errors import DataError
from firecaffe.exchange.leaves import leaf_share
from tests.unit.data.test_packed import make_folder, pack


class Slow:
    """A data set of one's own, that notices who asks it at the same time."""

    sample_CHW = (1, 2, 2)
    num_classes = 2
    fetchers = 1

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad = count, bad
        self.asked: list[int] = []
        self.inside = threading.Lock()

    def __len__(self) -> int:
        return self.count

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        assert self.inside.acquire(blocking=False), "two threads at a time"
        try:
            self.asked += indices_B.tolist()
            if self.bad in indices_B.tolist():
                raise DataError(f"sample {self.bad} is bad")
            images = indices_B.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).float()
            return images.clone(), indices_B % 2
        finally:
            self.inside.release()


def batches_of(dataset: Slow, batch: int = 6, micro: int = 2) -> Batches:
    return Batches(dataset, SampleOrder(0, len(dataset), batch, micro), DataConfig("own"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_same_batches_in_order_and_each_once(world_size: int) -> None:
    for rank in range(world_size):
        share = leaf_share(3, world_size, rank)
        own, plain = Slow(20), batches_of(Slow(20))
        ahead_of = BatchesAhead(batches_of(own), share, 2, 11)
        taken = 0
        for step in range(2, 11):
            for leaf in share:
                images, labels = ahead_of.train_batch(step, leaf)
                expected_images, expected_labels = plain.train_batch(step, leaf)
                assert torch.equal(images, expected_images)
                assert torch.equal(labels, expected_labels)
                taken += len(labels)
        ahead_of.close()
        assert len(own.asked) == taken


def test_other_leaves_from_a_step_on() -> None:
    """As if they had been those from the start; what waited is made for nothing, never taken."""
    own, plain = Slow(20), batches_of(Slow(20), batch=12)
    ahead_of = BatchesAhead(batches_of(own, batch=12), range(3), 0, 12)
    for step, leaves in enumerate([[0, 1, 2], [0, 1, 2], [4, 2, 3], [4, 2, 3], [5], [5]]):
        if list(leaves) != list(ahead_of.leaves):
            ahead_of.go_on(leaves, step)
        for leaf in leaves:
            images, labels = ahead_of.train_batch(step, leaf)
            expected_images, expected_labels = plain.train_batch(step, leaf)
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
    ahead_of.close()


def test_an_error_comes_with_its_batch() -> None:
    order = SampleOrder(0, 20, 6, 2)
    bad = int(order.micro_batch(1, 2)[0])
    batches = BatchesAhead(batches_of(Slow(20, bad)), range(3), 0, 100)
    for leaf in range(3):
        batches.train_batch(0, leaf)
    for leaf in range(2):
        batches.train_batch(1, leaf)
    with pytest.raises(DataError, match=f"sample {bad} is bad"):
        batches.train_batch(1, 2)
    batches.close()


def test_no_more_is_made_than_may_wait() -> None:
    begun: list[int] = []

    def calls() -> Iterator[Callable[[], int]]:
        for number in range(1000):
            begun.append(number)
            yield lambda: 0

    made = ahead(calls(), Slow(1), batch_bytes=1)
    next(made)
    assert len(begun) <= MOST + 1
    made.close()
    begun.clear()
    made = ahead(calls(), Slow(1), batch_bytes=10**12)
    next(made)
    assert len(begun) <= FEWEST + 1
    made.close()


def test_closing_ends_the_threads() -> None:
    batches = BatchesAhead(batches_of(Slow(20)), range(3), 0, 10**6)
    batches.train_batch(0, 0)
    batches.close()
    for thread in threading.enumerate():
        if thread.name.startswith("fetch"):
            thread.join(timeout=300)
            assert not thread.is_alive()


def test_data_in_memory_need_no_thread() -> None:
    dataset = TensorDataset(torch.zeros(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64))
    batches = BatchesAhead(
        Batches(dataset, SampleOrder(0, 20, 6, 2), DataConfig("own")), range(3), 0, 10
    )
    batches.train_batch(0, 0)
    assert not [each for each in threading.enumerate() if each.name.startswith("fetch")]


# --- the order of samples -------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
    shards=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda s: sum(s) > 0),
    micro=st.integers(1, 5),
    leaves=st.integers(1, 9),
    by_shard=st.booleans(),
)
def test_all_world_sizes_see_every_sample_once_in_the_same_order(
    seed: int, epoch: int, shards: list[int], micro: int, leaves: int, by_shard: bool
) -> None:
    count = sum(shards)
    counts = tuple(shards) if by_shard else ()
    order = SampleOrder(seed, count, micro * leaves, micro, counts)
    first = epoch * order.steps_per_epoch
    steps = range(first, first + order.steps_per_epoch)
    seen = []
    for world_size in range(1, min(8, leaves) + 1):
        shares = [leaf_share(leaves, world_size, rank) for rank in range(world_size)]
        seen.append(
            [
                sample
                for step in steps
                for share in shares
                for leaf in share
                for sample in order.micro_batch(step, leaf).tolist()
            ]
        )
    assert sorted(seen[0]) == list(range(count))
    assert all(other == seen[0] for other in seen)
    if by_shard:
        ends = torch.tensor(shards).cumsum(0)
        shard_of = torch.searchsorted(ends, torch.tensor(seen[0]), right=True).tolist()
        changes = sum(a != b for a, b in pairwise(shard_of))
        assert changes == sum(size > 0 for size in shards) - 1


@given(st.integers(0, 10), st.integers(1, 40), st.integers(0, 39), st.integers(1, 8))
def test_a_resume_repeats_and_skips_none(
    seed: int, steps: int, at: int, other_world_size: int
) -> None:
    """Half by one rank and the rest by others: what is left of the epoch."""
    at = min(at, steps)
    order = SampleOrder(seed, steps * 16, 16, 2)
    before = [s for step in range(at) for leaf in range(8) for s in order.micro_batch(step, leaf)]
    after = [
        sample
        for step in range(at, steps)
        for rank in range(other_world_size)
        for leaf in leaf_share(8, other_world_size, rank)
        for sample in order.micro_batch(step, leaf)
    ]
    assert [int(s) for s in before + after] == epoch_order(seed, 0, steps * 16).tolist()


def test_the_order_by_shard_is_another_each_epoch() -> None:
    orders = {tuple(epoch_order_by_shard(0, epoch, [10, 20, 30]).tolist()) for epoch in range(5)}
    assert len(orders) == 5


@pytest.mark.parametrize("augment", AUGMENTS)
def test_photos_do_not_depend_on_threads_or_batches(tmp_path: Path, augment: str) -> None:
    """The same pixels one by one and together, from the folder and from shards, ahead and not."""
    pack(make_folder(tmp_path / "photos"), tmp_path / "packed")
    words = {"resize": 16, "crop": 12, "mirror": True, "augment": augment}
    config = DataConfig("packed", str(tmp_path / "packed"), decode_threads=3, **words)  # type: ignore[arg-type]
    alone = DataConfig("packed", str(tmp_path / "packed"), decode_threads=1, **words)  # type: ignore[arg-type]
    order = SampleOrder(5, 30, 8, 4)
    together = BatchesAhead(Batches(open_data(config).train, order, config), range(2), 0, 8)
    single = Batches(open_data(alone).train, SampleOrder(5, 30, 8, 1), alone)
    for step in range(8):
        for leaf in range(2):
            images, labels = together.train_batch(step, leaf)
            parts = [single.train_batch(step, 4 * leaf + place) for place in range(4)]
            assert torch.equal(images, torch.cat([image for image, _ in parts]))
            assert torch.equal(labels, torch.cat([label for _, label in parts]))
    together.close()


def test_every_word_of_augment_has_its_way() -> None:
    assert tuple(FETCH) == AUGMENTS
