"""Codecs of rows: float16 and bfloat16 against the formats' definitions, a number at a time; int8
by hand, with bounds for any row, and rows that stand alone.
"""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.gradients.compressors.casts import BFLOAT16, FLOAT16
from firecaffe.gradients.compressors.codec import ROW, RowCodec
from firecaffe.gradients.compressors.int8 import INT8


def row_of(numbers: list[float]) -> torch.Tensor:
    row = torch.zeros(ROW)
    row[: len(numbers)] = torch.tensor(numbers)
    return row


def sent(codec: RowCodec, numbers: list[float]) -> list[float]:
    decoded: list[float] = codec.decode(codec.encode(row_of(numbers))).tolist()
    return decoded[: len(numbers)]


def nearest_bfloat16(number: float) -> float:
    """The upper half of a float32's bits, rounded to nearest, ties to even."""
    bits = int.from_bytes(struct.pack(">f", number))
    upper, lower = divmod(bits, 1 << 16)
    upper += lower > 1 << 15 or (lower == 1 << 15 and upper % 2 == 1)
    value: float = struct.unpack(">f", (upper << 16).to_bytes(4))[0]
    return value


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=20))
def test_float16_is_the_nearest_half(numbers: list[float]) -> None:
    assert sent(FLOAT16, numbers) == [struct.unpack("<e", struct.pack("<e", n))[0] for n in numbers]


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=20))
def test_bfloat16_is_the_nearest_upper_half(numbers: list[float]) -> None:
    assert sent(BFLOAT16, numbers) == [nearest_bfloat16(n) for n in numbers]


def test_what_float16_cannot_hold_is_infinite() -> None:
    assert sent(FLOAT16, [65519.0, 65520.0, -1e30]) == [65504, math.inf, -math.inf]


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_casts_take_two_bytes_and_keep_what_is_not_finite(codec: RowCodec) -> None:
    infinite, negative, nan, one = sent(codec, [math.inf, -math.inf, math.nan, 1.0])
    assert (infinite, negative, one) == (math.inf, -math.inf, 1)
    assert math.isnan(nan)
    assert codec.encode(torch.zeros(3 * ROW)).shape == (3, codec.row_bytes) == (3, 2 * ROW)
    assert not codec.remembers


TINY = 2.0**-126


def of_int8(row: torch.Tensor) -> torch.Tensor:
    return INT8.decode(INT8.encode(row))


def test_codes_are_rounded_to_even_and_the_scale_comes_last() -> None:
    encoded = bytes(INT8.encode(row_of([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.25, 127])).view(-1))
    assert struct.unpack("8b", encoded[:8]) == (0, 2, 2, 0, -2, -2, 3, 127)
    assert struct.unpack("<f", encoded[ROW:]) == (1.0,)
    assert INT8.encode(torch.ones(5 * ROW)).shape == (5, INT8.row_bytes) == (5, 260)
    assert of_int8(torch.zeros(0)).shape == (0,)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=ROW))
def test_half_a_step_is_the_largest_error_and_the_rest_is_exact(numbers: list[float]) -> None:
    row = row_of(numbers)
    step = row.double().abs().max() / 127
    rest = row - of_int8(row)
    assert (rest.double().abs() <= torch.clamp(step / 2 * (1 + 2.0**-20), min=127 * TINY)).all()
    assert torch.equal(of_int8(row) + rest, row)


def test_each_row_is_encoded_as_if_alone() -> None:
    rows = torch.randn(6 * ROW, generator=torch.Generator().manual_seed(0))
    rows[:ROW] *= 1e6
    alone = [INT8.encode(row) for row in rows.view(6, ROW)]
    assert torch.equal(INT8.encode(rows), torch.cat(alone))
    assert torch.equal(INT8.decode(torch.cat(alone)[2:5]), of_int8(rows)[2 * ROW : 5 * ROW])


def test_a_row_without_a_usable_scale_sends_zeros() -> None:
    for number in (0.0, -0.0, TINY, 100 * TINY, 1e-45):
        row = torch.full((ROW,), number)
        assert not INT8.encode(row).any()
        assert torch.equal(of_int8(row), torch.zeros(ROW))
    smallest = torch.full((ROW,), 127 * TINY)
    assert torch.equal(of_int8(smallest), smallest)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_row_nan(number: float) -> None:
    rows = torch.ones(3 * ROW)
    rows[ROW + 7] = number
    decoded = of_int8(rows).view(3, ROW)
    assert decoded[1].isnan().all()
    assert decoded[::2].isfinite().all()
