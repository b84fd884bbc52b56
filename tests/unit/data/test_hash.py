"""The hash against SplitMix64 written in plain Python integers, and against published outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data.hash import Stream, below, hash64

MASK = 2**64 - 1
KEYS = st.integers(-(2**63), 2**64 - 1)


def splitmix64_output(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_hash(*keys: int) -> int:
    state = 0
    for key in keys:
        state = splitmix64_output(state ^ (key & MASK))
    return state


@pytest.mark.parametrize(
    ("seed", "first_output"),
    [
        (0, 0xE220A8397B1DCDAF),  # test vector of the Java and Rust implementations
        (1234567, 6457827717110365317),  # Rosetta Code, "Pseudo-random numbers/Splitmix64"
    ],
)
def test_one_key_gives_the_published_output(seed: int, first_output: int) -> None:
    assert int(hash64(seed)) & MASK == first_output


@settings(max_examples=200)
@given(st.lists(KEYS, min_size=1, max_size=4))
def test_equals_plain_python(keys: list[int]) -> None:
    assert int(hash64(*keys)) & MASK == slow_hash(*keys)


@settings(max_examples=50)
@given(KEYS, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), KEYS)
def test_a_tensor_of_keys_is_hashed_element_by_element(a: int, b: list[int], c: int) -> None:
    hashes = hash64(a, torch.tensor(b), c)
    assert [h & MASK for h in hashes.tolist()] == [slow_hash(a, each, c) for each in b]


def test_keys_broadcast() -> None:
    rows, columns = torch.arange(3).view(-1, 1), torch.arange(4)
    hashes = hash64(5, rows, columns)
    assert hashes.shape == (3, 4)
    assert int(hashes[2, 3]) & MASK == slow_hash(5, 2, 3)


def test_no_two_samples_share_a_number() -> None:
    assert len(set(hash64(7, Stream.ORDER, 0, torch.arange(100_000)).tolist())) == 100_000


@settings(max_examples=50)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 10**6))
def test_below_takes_the_upper_63_bits(value: int, bound: int) -> None:
    assert int(below(torch.tensor(value), bound)) == ((value & MASK) >> 1) % bound


def test_streams_have_numbers_of_their_own() -> None:
    assert len(set(Stream.__members__)) == len({int(stream) for stream in Stream})
