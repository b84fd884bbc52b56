"""Every sample exactly once in an epoch, whoever asks for which leaf."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data import SampleOrder, epoch_order
from firecaffe.data.hash import Stream, hash64
from firecaffe.errors import DataError, RecipeError

SEEDS = st.integers(0, 2**63)


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    micro_batch_size = draw(st.integers(1, 7))
    return SampleOrder(
        seed=draw(SEEDS),
        num_samples=draw(st.integers(1, 120)),
        global_batch_size=micro_batch_size * draw(st.integers(1, 9)),
        micro_batch_size=micro_batch_size,
    )


def leaves_of_epoch(order: SampleOrder, epoch: int) -> list[torch.Tensor]:
    first = epoch * order.steps_per_epoch
    return [
        order.micro_batch(step, leaf)
        for step in range(first, first + order.steps_per_epoch)
        for leaf in range(order.num_micro_batches)
    ]


@settings(max_examples=60)
@given(orders(), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(order: SampleOrder, epoch: int) -> None:
    visited = torch.cat(leaves_of_epoch(order, epoch))
    assert sorted(visited.tolist()) == list(range(order.num_samples))
    assert torch.equal(visited, epoch_order(order.seed, epoch, order.num_samples))


@settings(max_examples=60)
@given(orders(), st.integers(1, 9), st.integers(0, 3))
def test_workers_get_the_same_leaves_in_any_number(
    order: SampleOrder, num_workers: int, epoch: int
) -> None:
    """Workers take turns asking, each for its own leaves, each with an order of its own."""
    first = epoch * order.steps_per_epoch
    alone = leaves_of_epoch(order, epoch)
    leaves = order.num_micro_batches
    seen: Counter[int] = Counter()
    for worker in range(num_workers):
        own = SampleOrder(
            order.seed, order.num_samples, order.global_batch_size, order.micro_batch_size
        )
        for step in range(order.steps_per_epoch):
            for leaf in range(worker * leaves // num_workers, (worker + 1) * leaves // num_workers):
                got = own.micro_batch(first + step, leaf)
                assert torch.equal(got, alone[step * leaves + leaf])
                seen.update(got.tolist())
    assert seen == Counter(range(order.num_samples))


@settings(max_examples=60)
@given(orders(), st.integers(0, 500))
def test_sizes_add_up(order: SampleOrder, step: int) -> None:
    sizes = [len(order.micro_batch(step, leaf)) for leaf in range(order.num_micro_batches)]
    assert sum(sizes) == order.samples_in_step(step)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0
    assert order.epoch(step) * order.steps_per_epoch + order.step_in_epoch(step) == step
    whole_steps = order.step_in_epoch(step) < order.num_samples // order.global_batch_size
    assert (order.samples_in_step(step) == order.global_batch_size) == whole_steps


def test_the_order_is_that_of_the_hashes() -> None:
    hashes = [int(hash64(3, Stream.ORDER, 2, sample)) for sample in range(50)]
    assert epoch_order(3, 2, 50).tolist() == sorted(range(50), key=hashes.__getitem__)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    seen = {tuple(epoch_order(seed, epoch, 20).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(seen) == 25


def test_each_sample_comes_at_each_position_equally_often() -> None:
    """Chi-square over 2,000 epochs of 8 samples: 56 degrees of freedom, 99.99th percentile 104."""
    counts = torch.zeros(8, 8)
    for epoch in range(2_000):
        counts[torch.arange(8), epoch_order(1, epoch, 8)] += 1
    assert float(((counts - 250) ** 2 / 250).sum()) < 104


def test_changing_a_batch_changes_no_other() -> None:
    order = SampleOrder(seed=0, num_samples=10, global_batch_size=4, micro_batch_size=2)
    first = order.micro_batch(0, 0)
    kept = first.clone()
    first.zero_()
    assert torch.equal(order.micro_batch(0, 0), kept)


@pytest.mark.parametrize("leaf", [-1, 2])
def test_a_leaf_that_is_not_there(leaf: int) -> None:
    order = SampleOrder(seed=0, num_samples=10, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(IndexError, match=f"leaf is {leaf}, expected 0 to 1"):
        order.micro_batch(0, leaf)


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ((0, 4, 2), DataError, "0 samples"),
        ((10, 4, 0), RecipeError, "micro_batch_size is 0"),
        ((10, 0, 2), RecipeError, "global_batch_size is 0"),
        ((10, 5, 2), RecipeError, "global_batch_size is 5, expected a multiple"),
    ],
)
def test_impossible_sizes(sizes: tuple[int, int, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SampleOrder(0, *sizes)


@settings(max_examples=60)
@given(orders(), st.integers(0, 40))
def test_samples_are_counted_as_steps_take_them(order: SampleOrder, steps: int) -> None:
    seen = sum(order.samples_in_step(step) for step in range(steps))
    assert order.samples_before(steps) == seen
    if steps:
        # As many steps see as many samples, but for an epoch's end, whose step may be nearly empty.
        assert (
            abs(order.samples_before(order.steps_for(seen)) - seen) <= order.global_batch_size / 2
        )
