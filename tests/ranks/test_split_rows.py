"""Rows of images over 1, 2 and 4 ranks: the same bits, and the bytes of the formula."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from firecaffe.caffe.local_response_norm import LocalResponseNorm
from firecaffe.parallel.volumes import by_rows, gather_numbers
from firecaffe.plan.layer_traffic import layers_on
from tests.ranks.splitting import compare_ranks, sent_by
from tests.world import Ranks


def small() -> nn.Module:
    """AlexNet's first layers in small, one row a part in the end, and batch normalization."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 11, 4), nn.ReLU(), LocalResponseNorm(3, 0.5), nn.Dropout(0.2)),
        *(nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(4, 6, 5, padding=2, groups=2)),
        *(nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.AvgPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 4 * 3, 5)),
    ).double()


def test_any_number_of_ranks_ends_in_the_same_bits(ranks: Ranks) -> None:
    words = {"[0-9]": "rows", "11": "inputs"}
    compare_ranks(ranks, small, words, (3, 71, 55))


def sent() -> list[int]:
    x = torch.ones(2, 3, 8, 5).requires_grad_()
    return sent_by(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), {"0": "rows"}, x)


def test_bytes_of_rows_are_those_of_the_formula(ranks: Ranks) -> None:
    """A row goes over a border each way. The input was whole and is to be, and so the output."""
    found = ranks.shared(4, sent)
    weights, row = 4 * 3 * 9 + 4, 2 * 3 * 5
    rows = by_rows(4, weights, 2 * row)
    whole = gather_numbers(4, 2 * 3 * 8 * 5, 8) + gather_numbers(4, 2 * 4 * 8 * 5, 8)
    assert sum(map(sum, found)) / 4 == 4 * (rows + whole)
    assert found[0][0] == 4 * (row + gather_numbers(4, 2 * 4 * 8 * 5, 8))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "stride": lambda: nn.Conv2d(3, 4, 5, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(3, 2, 3, padding=2, dilation=2),
    "norm": lambda: nn.BatchNorm2d(3),
}


def sent_of(name: str, wants_gradient: bool) -> list[int]:
    x = torch.ones(2, 3, 11, 5).requires_grad_(wants_gradient)
    return sent_by(nn.Sequential(LAYERS[name]()), {"0": "rows"}, x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wants_gradient", [True, False])
def test_what_is_planned_of_rows_is_what_they_send(
    ranks: Ranks, name: str, wants_gradient: bool
) -> None:
    found = ranks.shared(4, sent_of, name, wants_gradient)
    layer = LAYERS[name]()
    [planned] = layers_on(nn.Sequential(layer), torch.ones(2, 3, 11, 5))
    assert planned.images is not None
    sizes = dataclasses.replace(planned.sizes, input_has_gradient=wants_gradient)
    numbers = planned.images.numbers(sizes, 2, 4)
    assert numbers is not None
    assert sum(map(sum, found)) / 4 == pytest.approx(4 * numbers)
    assert planned.images.numbers(sizes, 2, 12) is None
