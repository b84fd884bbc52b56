"""Codecs against their definitions, a number at a time: casts; int8 by hand, with bounds for any
row; one_bit; top_k by a sort in plain Python; threshold, which neither falls silent nor swells.
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
from firecaffe.gradients.compressors.one_bit import ONE_BIT
from firecaffe.gradients.compressors.threshold import THRESHOLD
from firecaffe.gradients.compressors.top_k import TOP_K, largest, num_sent


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
    for codec in (FLOAT16, BFLOAT16):
        assert codec.encode(torch.zeros(3 * ROW)).shape == (3, codec.row_bytes) == (3, 2 * ROW)


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


numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


def one_bit(values: list[float]) -> torch.Tensor:
    x = torch.tensor(values)
    return ONE_BIT.encode(x, torch.zeros_like(x))


def sent_by_sign(values: list[float]) -> list[float]:
    decoded: list[float] = ONE_BIT.decode(one_bit(values), len(values)).tolist()
    return decoded


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / max(1, len(values))


@given(numbers)
def test_each_sign_is_sent_as_its_mean(values: list[float]) -> None:
    upper = mean_of([v for v in values if v >= 0])
    lower = mean_of([v for v in values if v < 0])
    expected = [upper if v >= 0 else lower for v in values]
    assert sent_by_sign(values) == pytest.approx(expected, rel=1e-5, abs=1e-30)


@given(numbers)
def test_bits_lie_lowest_first_behind_the_two_values(values: list[float]) -> None:
    payload = bytes(one_bit(values))
    assert len(payload) == 8 + -(-len(values) // 8)
    bits = sum((v >= 0) << place for place, v in enumerate(values))
    assert int.from_bytes(payload[8:], "little") == bits


def test_a_sign_that_no_element_has_stands_for_0_and_one_element_for_itself() -> None:
    assert struct.unpack("<2f", bytes(one_bit([1.0, 2.0]))[:8]) == (0, 1.5)
    assert struct.unpack("<2f", bytes(one_bit([-1.0, -2.0]))[:8]) == (-1.5, 0)
    for number in (0.1, -0.1):
        assert sent_by_sign([number]) == [torch.tensor(number).item()]
    for length in (0, 1, 8, 9, 300):
        assert sent_by_sign([0.0] * length) == [0.0] * length


few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 1e-40, -3e38])


def top_k(x: torch.Tensor) -> torch.Tensor:
    return TOP_K.encode(x, torch.zeros_like(x))


@given(
    st.lists(few_values | st.floats(width=32, allow_nan=False), min_size=1, max_size=60),
    st.integers(1, 60),
)
def test_the_largest_and_of_equals_the_first(values: list[float], count: int) -> None:
    count = min(count, len(values))
    by_size = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert largest(torch.tensor(values), count).tolist() == sorted(by_size[:count])


@pytest.mark.parametrize(
    ("num_elements", "count"),
    [(0, 0), (1, 1), (63, 1), (64, 1), (128, 2), (6400, 100), (6463, 100)],
)
def test_an_index_and_a_value_for_one_element_in_64(num_elements: int, count: int) -> None:
    x = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    assert num_sent(num_elements) == count
    payload = bytes(top_k(x))
    assert len(payload) == 8 * count
    numbers = struct.unpack(f"<{count}i{count}f", payload)
    by_size = sorted(range(num_elements), key=lambda i: -abs(x[i].item()))[:count]
    assert list(numbers[:count]) == sorted(by_size)
    assert list(numbers[count:]) == [x[i].item() for i in sorted(by_size)]
    decoded = TOP_K.decode(top_k(x), num_elements).tolist()
    assert decoded == [x[i].item() if i in by_size else 0 for i in range(num_elements)]


pairs = st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2), min_size=1, max_size=40)


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values))


def float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def read(payload: torch.Tensor) -> tuple[float, list[int]]:
    """tau, and what was sent: index + 1, negative where tau was."""
    (tau, *entries) = struct.unpack(f"<f{payload.numel() // 4 - 1}I", bytes(payload))
    return tau, [(e & 0x7FFFFFFF) + 1 if e < 1 << 31 else -(e & 0x7FFFFFFF) - 1 for e in entries]


def test_several_tau_of_one_element_and_signs() -> None:
    x = torch.tensor([16.0, -35.0, 4.0] + [0.0] * 61)
    payload = THRESHOLD.encode(x, x - torch.tensor([0.0] * 63 + [16.0]))
    tau, entries = read(payload)
    assert tau == 16
    assert entries == [1, -2, -2]
    assert THRESHOLD.decode(payload, 64).tolist() == [16.0, -32.0] + [0.0] * 62


@given(pairs)
def test_what_is_sent_is_the_whole_tau_in_each_element(values: list[tuple[float, float]]) -> None:
    """In no more bytes than the tensor's, and nothing as large as tau waits."""
    x, memory = torch.tensor(values).unbind(1)
    payload = THRESHOLD.encode(x, memory)
    tau, entries = read(payload)
    assert payload.numel() == 4 + 4 * len(entries) <= 4 + 4 * len(values)
    gradient = (x - memory).tolist()
    expected = max(8 * root_mean_square(gradient), root_mean_square(x.tolist()))
    assert tau == pytest.approx(max(expected, 2.0**-126), rel=1e-6)
    times = [math.copysign(math.floor(float32(abs(v) / tau)), v) for v in x.tolist()]
    decoded = THRESHOLD.decode(payload, len(values))
    assert decoded.tolist() == [float32(t * tau) for t in times]
    rest = x - decoded
    assert (rest.abs() < tau).all()
    assert torch.equal(decoded + rest, x)


def shares_sent(gradients: list[torch.Tensor]) -> list[float]:
    """Entries for each element, in each step."""
    memory = torch.zeros_like(gradients[0])
    shares = []
    for gradient in gradients:
        x = gradient + memory
        payload = THRESHOLD.encode(x, memory)
        memory = x - THRESHOLD.decode(payload, x.numel())
        shares.append((payload.numel() - 4) / 4 / x.numel())
    return shares


def test_one_in_64_of_noise_and_one_in_8_of_signs_that_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(4000, generator=generator) for _ in range(200)]
    shares = shares_sent(noise)[100:]
    assert 0.8 / 64 < sum(shares) / len(shares) < 1.2 / 64
    sign = torch.randn(4000, generator=generator).sign()
    steady = [sign + 0.01 * torch.randn(4000, generator=generator) for _ in range(200)]
    shares = shares_sent(steady)[100:]
    assert 0.11 < sum(shares) / len(shares) < 0.14


def test_gradients_that_vanish_still_send_what_waits() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = shares_sent([torch.randn(1000, generator=generator), *[torch.zeros(1000)] * 20])
    assert all(0 < share <= 1 for share in shares[1:])
    for length in (0, 1, 9):  # and where nothing waits, nothing is sent
        payload = THRESHOLD.encode(torch.zeros(length), torch.zeros(length))
        assert read(payload) == (2.0**-126, [])
        assert THRESHOLD.decode(payload, length).tolist() == [0.0] * length


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**90])
def test_a_scale_changes_tau_and_nothing_else(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, memory = torch.randn(2, 500, generator=generator) * torch.tensor([[6.0], [5.9]])
    payload = THRESHOLD.encode(x, memory)
    scaled = THRESHOLD.encode(x * scale, memory * scale)
    assert read(scaled) == (read(payload)[0] * scale, read(payload)[1])
