"""top_k against a sort in plain Python."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.gradients.compressors.top_k import TOP_K, largest, largest_at, num_sent

few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 1e-40, -3e38])


def encode(x: torch.Tensor) -> torch.Tensor:
    return TOP_K.encode(x, torch.zeros_like(x))


@given(
    st.lists(few_values | st.floats(width=32, allow_nan=False), min_size=1, max_size=60),
    st.integers(1, 60),
)
def test_the_largest_and_of_equals_the_first(values: list[float], count: int) -> None:
    count = min(count, len(values))
    by_size = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert largest(torch.tensor(values), count).tolist() == sorted(by_size[:count])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50), st.data())
def test_the_place_of_a_key_is_that_in_a_sort(keys: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(1, len(keys)))
    found = largest_at(torch.tensor(keys, dtype=torch.int32), place)
    assert found.item() == sorted(keys, reverse=True)[place - 1]


@pytest.mark.parametrize(
    ("num_elements", "count"),
    [(0, 0), (1, 1), (63, 1), (64, 1), (128, 2), (6400, 100), (6463, 100)],
)
def test_an_index_and_a_value_for_one_element_in_64(num_elements: int, count: int) -> None:
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    assert num_sent(num_elements) == count
    payload = bytes(encode(x))
    assert len(payload) == 8 * count
    numbers = struct.unpack(f"<{count}i{count}f", payload)
    by_size = sorted(range(num_elements), key=lambda i: -abs(x[i].item()))[:count]
    assert list(numbers[:count]) == sorted(by_size)
    assert list(numbers[count:]) == [x[i].item() for i in sorted(by_size)]


def test_what_is_sent_is_exact_and_all_else_zero() -> None:
    x = torch.randn(640, generator=torch.Generator().manual_seed(2))
    decoded = TOP_K.decode(encode(x), 640)
    is_sent = decoded != 0
    assert is_sent.sum() == 10
    assert torch.equal(decoded[is_sent], x[is_sent])
    assert x[is_sent].abs().min() >= x[~is_sent].abs().max()


def test_all_equal() -> None:
    x = torch.full((256,), -2.0)
    assert TOP_K.decode(encode(x), 256).tolist() == [-2.0] * 4 + [0.0] * 252


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_sent_first(number: float) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(3)) * 1e30
    x[41] = number
    decoded = TOP_K.decode(encode(x), 100)
    assert decoded.isfinite().logical_not().nonzero().tolist() == [[41]]
