"""Samples drawn by weights: the same on every machine, as often as their weights say."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from firecaffe.data import DataConfig, DataParts, SampleOrder, TensorDataset, divide, drawing_of
from firecaffe.data.hash import Stream, hash64
from firecaffe.data.own_data import check_own
from firecaffe.data.sample_order import Drawing
from firecaffe.data.sample_weights import SUM_BITS, whole
from firecaffe.errors import FirecaffeError
from tests.unit.data.test_packed import make_folder

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
        found = Drawing(sums).epoch_order(seed, epoch).tolist()
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
    """Of 30,000 draws a third each, within five standard deviations of a binomial; by own weights,
    what they say of the samples that are not held out.
    """
    config = DataConfig(balance=balance, hold_out=held_out)
    own = check_own("train_set", dataset)
    data = divide(DataParts(own, own), config)
    drawing = drawing_of(data.train, balance)
    assert drawing is not None
    assert len(drawing.sums_N) == len(data.train)
    _, classes = data.train.batch(torch.arange(len(data.train)))
    drawn = torch.cat([drawing.epoch_order(1, epoch) for epoch in range(30_000 // len(data.train))])
    weights = 1 / (classes if balance == "classes" else CLASSES).bincount().double()[classes]
    for each in classes.unique():
        share = float(weights[classes == each].sum() / weights.sum())
        spread = (len(drawn) * share * (1 - share)) ** 0.5
        assert abs(int((classes[drawn] == each).sum()) - len(drawn) * share) < 5 * spread


def test_an_order_that_draws_has_epochs_of_as_many_samples() -> None:
    drawing = drawing_of(TensorDataset(INPUTS, CLASSES), "classes")
    assert drawing is not None
    order = SampleOrder(3, 100, 24, 8, drawing=drawing)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = torch.cat([order.micro_batch(step, leaf) for step in steps for leaf in range(3)])
        assert torch.equal(seen, drawing.epoch_order(3, epoch))


def test_photos_say_their_classes_and_their_names(tmp_path: Path) -> None:
    from firecaffe.data import num_classes, open_data

    config = DataConfig("folder", str(make_folder(tmp_path)), balance="classes", resize=16)
    data = open_data(config)
    assert drawing_of(data.train, "classes") is not None
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
    with pytest.raises(FirecaffeError) as caught:
        drawing_of(check_own("train_set", Said(**words)), balance)
    assert all(part in str(caught.value) for part in parts), caught.value
