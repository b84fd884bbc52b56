"""float16 and bfloat16 against the formats' definitions, a number at a time."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.gradients.compressors.casts import BFLOAT16, FLOAT16
from firecaffe.gradients.compressors.codec import ROW, RowCodec

BOTH = pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])


def sent(codec: RowCodec, numbers: list[float]) -> list[float]:
    row = torch.zeros(ROW)
    row[: len(numbers)] = torch.tensor(numbers)
    decoded: list[float] = codec.decode(codec.encode(row)).tolist()
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


@BOTH
def test_what_is_not_finite_stays_so(codec: RowCodec) -> None:
    infinite, negative, nan, one = sent(codec, [math.inf, -math.inf, math.nan, 1.0])
    assert (infinite, negative, one) == (math.inf, -math.inf, 1)
    assert math.isnan(nan)


@BOTH
def test_two_bytes_an_element(codec: RowCodec) -> None:
    assert codec.encode(torch.zeros(3 * ROW)).shape == (3, codec.row_bytes) == (3, 2 * ROW)
    assert not codec.remembers
