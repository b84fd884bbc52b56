"""one_bit against its definition, element by element."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.gradients.compressors.one_bit import ONE_BIT

numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


def encode(values: list[float]) -> torch.Tensor:
    x = torch.tensor(values)
    return ONE_BIT.encode(x, torch.zeros_like(x))


def sent(values: list[float]) -> list[float]:
    decoded: list[float] = ONE_BIT.decode(encode(values), len(values)).tolist()
    return decoded


def mean(values: list[float]) -> float:
    return math.fsum(values) / max(1, len(values))


@given(numbers)
def test_each_sign_is_sent_as_its_mean(values: list[float]) -> None:
    upper = mean([v for v in values if v >= 0])
    lower = mean([v for v in values if v < 0])
    expected = [upper if v >= 0 else lower for v in values]
    assert sent(values) == pytest.approx(expected, rel=1e-5, abs=1e-30)


@given(numbers)
def test_bits_lie_lowest_first_behind_the_two_values(values: list[float]) -> None:
    payload = bytes(encode(values))
    assert len(payload) == 8 + -(-len(values) // 8)
    bits = sum((v >= 0) << place for place, v in enumerate(values))
    assert int.from_bytes(payload[8:], "little") == bits


def test_no_other_two_values_have_a_smaller_squared_error() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).tolist()
    lower, upper = struct.unpack("<2f", bytes(encode(values))[:8])

    def squared_error(low: float, high: float) -> float:
        return math.fsum((v - (high if v >= 0 else low)) ** 2 for v in values)

    best = squared_error(lower, upper)
    assert all(
        squared_error(lower + a, upper + b) > best
        for a in (-0.01, 0, 0.01)
        for b in (-0.01, 0, 0.01)
        if (a, b) != (0, 0)
    )


def test_a_sign_that_no_element_has_stands_for_0() -> None:
    assert struct.unpack("<2f", bytes(encode([1.0, 2.0]))[:8]) == (0, 1.5)
    assert struct.unpack("<2f", bytes(encode([-1.0, -2.0]))[:8]) == (-1.5, 0)


def test_one_element_is_sent_as_it_is() -> None:
    assert sent([0.1]) == [torch.tensor(0.1).item()]
    assert sent([-0.1]) == [torch.tensor(-0.1).item()]


@pytest.mark.parametrize("length", [0, 1, 8, 9, 300])
def test_zeros_are_zeros(length: int) -> None:
    assert sent([0.0] * length) == [0.0] * length


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_turn_finite(number: float) -> None:
    assert not math.isfinite(sent([1.0, -1.0, number, 2.0, -3.0])[2])
