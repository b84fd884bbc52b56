"""Every sample exactly once in an epoch, or as often as its weight says, whoever asks."""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data import (
    DataConfig,
    DataParts,
    SampleOrder,
    TensorDataset,
    divide,
    num_classes,
    open_data,
    weighted_draws,
)
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.own_data import check_own
from firecaffe.data.sample_order import (
    SUM_BITS,
    WeightedDraws,
    epoch_order,
    epoch_order_by_shard,
    whole,
)
from firecaffe.errors import DataError, FirecaffeError, RecipeError
from tests.kit.data_photos import make_folder
from tests.kit.models_refused import refused

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
    seen = order.samples_before(step)
    assert order.samples_before(step + 1) == seen + order.samples_in_step(step)
    assert order.samples_before(0) == 0
    if step:  # as many see as many, but for an epoch's end, whose step may be nearly empty
        as_many = order.samples_before(order.steps_for(seen))
        assert abs(as_many - seen) <= order.global_batch_size / 2


@settings(max_examples=60)
@given(
    seed=SEEDS,
    epoch=st.integers(0, 1000),
    shards=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda s: sum(s) > 0),
    micro=st.integers(1, 5),
    leaves=st.integers(1, 9),
    by_shard=st.booleans(),
)
def test_an_epoch_has_every_sample_once_whoever_asks(
    seed: int, epoch: int, shards: list[int], micro: int, leaves: int, by_shard: bool
) -> None:
    count = sum(shards)
    order = SampleOrder(seed, count, micro * leaves, micro, tuple(shards) if by_shard else ())
    first = epoch * order.steps_per_epoch
    batches = [
        [order.micro_batch(step, leaf).tolist() for leaf in range(leaves)]
        for step in range(first, first + order.steps_per_epoch)
    ]
    seen = [sample for step in batches for leaf in step for sample in leaf]
    assert sorted(seen) == list(range(count))
    if by_shard:
        ends = torch.tensor(shards).cumsum(0)
        shard_of = torch.searchsorted(ends, torch.tensor(seen), right=True).tolist()
        changes = sum(a != b for a, b in pairwise(shard_of))
        assert changes == sum(size > 0 for size in shards) - 1
    else:
        assert seen == epoch_order(seed, epoch, count).tolist()


def test_the_order_is_that_of_the_hashes() -> None:
    for seed, epoch in ((3, 2), (3, 0), (2**62, 10**6)):
        hashes = [int(hash64(seed, Stream.ORDER, epoch, sample)) for sample in range(50)]
        assert epoch_order(seed, epoch, 50).tolist() == sorted(range(50), key=hashes.__getitem__)


def test_the_order_by_shard_is_another_each_epoch() -> None:
    orders = {tuple(epoch_order_by_shard(0, epoch, [10, 20, 30]).tolist()) for epoch in range(5)}
    assert len(orders) == 5


def test_changing_a_batch_changes_no_other() -> None:
    order = SampleOrder(seed=0, num_samples=10, global_batch_size=4, micro_batch_size=2)
    first = order.micro_batch(0, 0)
    kept = first.clone()
    first.zero_()
    assert torch.equal(order.micro_batch(0, 0), kept)
    for leaf in (-1, 2):
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


CLASSES = torch.tensor([0] * 90 + [1] * 9 + [2])
INPUTS = torch.zeros(100, 2)


class Said:
    """A data set of the protocol that says its classes, or anything else."""

    def __init__(self, **words: Any) -> None:
        vars(self).update(words)

    def __len__(self) -> int:
        return 100

    def batch(self, indices: torch.Tensor) -> Any:
        return INPUTS[indices], CLASSES[indices]


def test_a_position_s_sample_is_the_formula_in_exact_arithmetic() -> None:
    weights = [5, 0, 1, 2**40, 3]
    sums = torch.tensor(weights).cumsum(0)
    for seed, epoch in ((0, 0), (7, 3), (2**62, 10**6)):
        found = WeightedDraws(sums).epoch_order(seed, epoch).tolist()
        for position, sample in enumerate(found):
            bits = int(hash64(seed, Stream.BALANCE, epoch, position)) % 2**64 >> 11
            place = float(Fraction(bits, 2**53)) * sum(weights)  # one rounding, as IEEE has it
            assert int(sums[sample]) > int(place) >= int(sums[sample]) - weights[sample]
            assert weights[sample]


def test_weights_as_whole_numbers_keep_their_ratios_and_never_vanish() -> None:
    weights = torch.tensor([1.0, 1e-30, 0.0, 0.25, 3.0], dtype=torch.float64)
    found = whole(weights)
    assert found.tolist()[1:3] == [1, 0]
    assert int(found.sum()) <= 2**SUM_BITS
    assert torch.allclose(found.double() / found.max(), weights / weights.max(), atol=1e-12)


@pytest.mark.parametrize(
    ("dataset", "balance"),
    [
        (TensorDataset(INPUTS, CLASSES), "classes"),
        (Said(targets=CLASSES.tolist()), "classes"),
        (TensorDataset(INPUTS, CLASSES, sample_weights=1 / CLASSES.bincount()[CLASSES]), "own"),
        (Said(sample_weights=[1 / [90, 9, 1][each] for each in CLASSES.tolist()]), "own"),
    ],
)
@pytest.mark.parametrize("held_out", [0.0, 0.5])
def test_every_class_comes_as_often(dataset: Any, balance: str, held_out: float) -> None:
    """Of 10,000 draws a third each, within five standard deviations of a binomial; by own weights,
    what they say of the samples that are not held out.
    """
    config = DataConfig(balance=balance, hold_out=held_out)
    own = check_own("train_set", dataset)
    data = divide(DataParts(own, own), config)
    drawing = weighted_draws(data.train, balance)
    assert drawing is not None
    assert len(drawing.sums_N) == len(data.train)
    _, classes = data.train.batch(torch.arange(len(data.train)))
    drawn = torch.cat([drawing.epoch_order(1, epoch) for epoch in range(10_000 // len(data.train))])
    weights = 1 / (classes if balance == "classes" else CLASSES).bincount().double()[classes]
    for each in classes.unique():
        share = float(weights[classes == each].sum() / weights.sum())
        spread = (len(drawn) * share * (1 - share)) ** 0.5
        assert abs(int((classes[drawn] == each).sum()) - len(drawn) * share) < 5 * spread


def test_an_order_that_draws_has_epochs_of_as_many_samples() -> None:
    drawing = weighted_draws(TensorDataset(INPUTS, CLASSES), "classes")
    assert drawing is not None
    order = SampleOrder(3, 100, 24, 8, drawing=drawing)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = torch.cat([order.micro_batch(step, leaf) for step in steps for leaf in range(3)])
        assert torch.equal(seen, drawing.epoch_order(3, epoch))


def test_photos_say_their_classes_and_their_names(tmp_path: Path) -> None:
    data = open_data(DataConfig("folder", str(make_folder(tmp_path)), resize=16))
    assert weighted_draws(data.train, "classes") is not None
    assert len(data.class_names) == num_classes(data.train)


@pytest.mark.parametrize(
    ("words", "balance", "parts"),
    [
        ({}, "classes", ["data.balance is classes", "targets", "sample_weights"]),
        ({}, "own", ["data.balance is own", "no sample_weights"]),
        ({"targets": [0, 1]}, "classes", ["targets", "(2,)", "100"]),
        ({"targets": ["a"] * 100}, "classes", ["targets are no numbers"]),
        ({"targets": INPUTS[:, 0]}, "classes", ["torch.float32", "whole numbers"]),
        ({"targets": CLASSES - 1}, "classes", ["the class -1"]),
        ({"sample_weights": [1.0] * 99 + [-1.0]}, "own", ["sample_weights[99] is -1"]),
        ({"sample_weights": [float("inf")] * 100}, "own", ["sample_weights[0] is inf"]),
        ({"sample_weights": [0] * 100}, "own", ["all 0"]),
    ],
)
def test_what_cannot_be_drawn_by_is_one_line(
    words: dict[str, Any], balance: str, parts: list[str]
) -> None:
    with refused(FirecaffeError, parts):
        weighted_draws(check_own("train_set", Said(**words)), balance)
