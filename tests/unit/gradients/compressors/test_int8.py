"""int8: codes and scales by hand, bounds for any row, rows that stand alone."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.compressors.int8 import INT8

TINY = 2.0**-126


def row_of(numbers: list[float]) -> torch.Tensor:
    row = torch.zeros(ROW)
    row[: len(numbers)] = torch.tensor(numbers)
    return row


def sent(row: torch.Tensor) -> torch.Tensor:
    return INT8.decode(INT8.encode(row))


def test_codes_are_rounded_to_even_and_the_scale_comes_last() -> None:
    encoded = bytes(INT8.encode(row_of([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.25, 127])).view(-1))
    assert struct.unpack("8b", encoded[:8]) == (0, 2, 2, 0, -2, -2, 3, 127)
    assert struct.unpack("<f", encoded[ROW:]) == (1.0,)


def test_a_row_takes_260_bytes() -> None:
    assert INT8.encode(torch.ones(5 * ROW)).shape == (5, INT8.row_bytes) == (5, 260)


finite_rows = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=ROW).map(
    row_of
)


@given(finite_rows)
def test_half_a_step_is_the_largest_error_and_the_rest_is_exact(row: torch.Tensor) -> None:
    step = row.double().abs().max() / 127
    rest = row - sent(row)
    assert (rest.double().abs() <= torch.clamp(step / 2 * (1 + 2.0**-20), min=127 * TINY)).all()
    assert torch.equal(sent(row) + rest, row)


def test_each_row_is_encoded_as_if_alone() -> None:
    rows = torch.randn(6 * ROW, generator=torch.Generator().manual_seed(0))
    rows[:ROW] *= 1e6
    alone = [INT8.encode(row) for row in rows.view(6, ROW)]
    assert torch.equal(INT8.encode(rows), torch.cat(alone))
    assert torch.equal(INT8.decode(torch.cat(alone)[2:5]), sent(rows)[2 * ROW : 5 * ROW])


@pytest.mark.parametrize("number", [0.0, -0.0, TINY, 100 * TINY, 1e-45])
def test_a_row_without_a_usable_scale_sends_zeros(number: float) -> None:
    row = torch.full((ROW,), number)
    assert not INT8.encode(row).any()
    assert torch.equal(sent(row), torch.zeros(ROW))


def test_the_smallest_row_that_is_sent() -> None:
    row = torch.full((ROW,), 127 * TINY)
    assert torch.equal(sent(row), row)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_row_nan(number: float) -> None:
    rows = torch.ones(3 * ROW)
    rows[ROW + 7] = number
    decoded = sent(rows).view(3, ROW)
    assert decoded[1].isnan().all()
    assert decoded[0].isfinite().all()
    assert decoded[2].isfinite().all()


def test_no_rows_at_all() -> None:
    assert sent(torch.zeros(0)).shape == (0,)
