"""threshold against its definition, and that it neither falls silent nor swells."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.gradients.compressors.threshold import THRESHOLD

numbers = st.floats(-1e6, 1e6, width=32)
pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=40)


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values))


def float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def read(payload: torch.Tensor) -> tuple[float, list[int]]:
    """tau, and what was sent: index + 1, negative where tau was."""
    (tau, *entries) = struct.unpack(f"<f{payload.numel() // 4 - 1}I", bytes(payload))
    return tau, [(e & 0x7FFFFFFF) + 1 if e < 1 << 31 else -(e & 0x7FFFFFFF) - 1 for e in entries]


def test_tau_and_entries_by_hand() -> None:
    # The gradient is 1 in one element of four, its root mean square 1/2, so tau is 4.
    memory = torch.tensor([-4.0, 3.75, 7.5, -3.0])
    x = memory + torch.tensor([0.0, 0.0, 1.0, 0.0])
    tau, entries = read(THRESHOLD.encode(x, memory))
    # (16 + 14.0625 + 72.25 + 9) / 4 is less than 5.3².
    assert tau == float32(math.sqrt((16 + 14.0625 + 72.25 + 9) / 4))
    assert entries == [3]
    tau, entries = read(THRESHOLD.encode(x * 0.5, memory * 0.5 - torch.tensor([0, 0, 2.0, 0])))
    assert tau == 10.0  # 8 · root mean square of (0, 0, 2.5, 0)
    assert entries == []


def test_several_tau_of_one_element_and_signs() -> None:
    x = torch.tensor([16.0, -35.0, 4.0] + [0.0] * 61)
    payload = THRESHOLD.encode(x, x - torch.tensor([0.0] * 63 + [16.0]))
    tau, entries = read(payload)
    assert tau == 16
    assert entries == [1, -2, -2]
    assert THRESHOLD.decode(payload, 64).tolist() == [16.0, -32.0] + [0.0] * 62


@given(pairs)
def test_what_is_sent_is_the_whole_tau_in_each_element(values: list[tuple[float, float]]) -> None:
    x, memory = torch.tensor(values).unbind(1)
    tau, _ = read(THRESHOLD.encode(x, memory))
    gradient = (x - memory).tolist()
    expected = max(8 * root_mean_square(gradient), root_mean_square(x.tolist()))
    assert tau == pytest.approx(max(expected, 2.0**-126), rel=1e-6)
    times = [math.copysign(math.floor(float32(abs(v) / tau)), v) for v in x.tolist()]
    decoded = THRESHOLD.decode(THRESHOLD.encode(x, memory), len(values))
    assert decoded.tolist() == [float32(t * tau) for t in times]


@given(pairs)
def test_no_longer_than_the_tensor_and_nothing_as_large_as_tau_waits(
    values: list[tuple[float, float]],
) -> None:
    x, memory = torch.tensor(values).unbind(1)
    payload = THRESHOLD.encode(x, memory)
    tau, entries = read(payload)
    assert payload.numel() == 4 + 4 * len(entries) <= 4 + 4 * len(values)
    decoded = THRESHOLD.decode(payload, len(values))
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


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**90])
def test_a_scale_changes_tau_and_nothing_else(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, memory = torch.randn(2, 500, generator=generator) * torch.tensor([[6.0], [5.9]])
    payload = THRESHOLD.encode(x, memory)
    scaled = THRESHOLD.encode(x * scale, memory * scale)
    assert read(scaled) == (read(payload)[0] * scale, read(payload)[1])


@pytest.mark.parametrize("length", [0, 1, 9])
def test_zeros_send_no_entry(length: int) -> None:
    payload = THRESHOLD.encode(torch.zeros(length), torch.zeros(length))
    assert read(payload) == (2.0**-126, [])
    assert THRESHOLD.decode(payload, length).tolist() == [0.0] * length


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_the_tensor_nan(number: float) -> None:
    x = torch.tensor([1.0, 2.0, number, 1e30])
    payload = THRESHOLD.encode(x, torch.zeros(4))
    assert THRESHOLD.decode(payload, 4).isnan().all()
