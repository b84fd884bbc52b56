"""Huffman codes against the entropy, against another few lines of Huffman, and bit by bit."""

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.compression.fcz.format import DamagedError
from firecaffe.compression.fcz.sequence import MOST_BITS, STRIDE, Code, code_lengths

COUNTS = st.lists(st.integers(0, 1000), min_size=1, max_size=200).filter(any)


def huffman_bits(counts: list[int]) -> int:
    """The bits of all symbols by Huffman's own rule: each merge adds a bit to all below it."""
    heap = [count for count in counts if count]
    if len(heap) == 1:
        return heap[0]
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


@given(COUNTS)
def test_lengths_are_optimal(counts: list[int]) -> None:
    lengths = code_lengths(np.array(counts))
    total = sum(counts)
    bits = int(lengths @ counts)
    shares = np.array([count / total for count in counts if count])
    entropy = float(-(shares * np.log2(shares)).sum())
    assert bits == huffman_bits(counts)
    if len(shares) > 1:
        assert entropy <= bits / total + 1e-9 < entropy + 1 + 1e-9
        assert sum(2.0 ** -int(length) for length in lengths if length) == 1


def test_lengths_are_limited() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = code_lengths(np.array(fibonacci))
    assert lengths.max() == MOST_BITS  # without a limit it would be 39
    assert sum(2.0 ** -int(length) for length in lengths) == 1
    assert Code(lengths).num_bits(np.arange(40, dtype=np.int32)) == lengths.sum()


@given(COUNTS, st.data())
def test_words_are_decoded(counts: list[int], data: Any) -> None:
    used = [symbol for symbol, count in enumerate(counts) if count]
    drawn = data.draw(st.lists(st.sampled_from(used), max_size=4 * STRIDE))
    symbols = np.array(drawn, np.int32)
    code = Code(code_lengths(np.array(counts)))
    sent = code.encode(symbols)
    assert 8 * len(sent) - 8 < code.num_bits(symbols) <= 8 * len(sent)
    assert code.decode(sent, len(symbols)).tolist() == drawn


def test_words_are_canonical() -> None:
    code = Code(np.array([2, 1, 3, 3]))  # 10, 0, 110, 111
    assert code.encode(np.array([0, 1, 2, 3], np.int32)) == bytes([0b10_0_110_11, 0b1_0000000])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=100))
def test_bytes_too_few_or_too_many_are_refused(symbols: list[int]) -> None:
    code = Code(np.array([2, 1, 3, 3]))
    sent = code.encode(np.array(symbols, np.int32))
    for wrong in (sent[:-1], sent + b"\0"):
        with pytest.raises(DamagedError):
            code.decode(wrong, len(symbols))


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_decoded_or_refused(data: bytes, count: int) -> None:
    code = Code(np.array([2, 1, 3, 3]))
    try:
        symbols = code.decode(data, count)
    except DamagedError:
        return
    assert len(symbols) == count
    again = code.encode(symbols)
    assert len(again) == len(data)
    assert again[:-1] == data[:-1]


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 2, 2], [17, 1], [2], [0, 0], [1, 2]])
def test_lengths_of_no_code_are_refused(lengths: list[int]) -> None:
    with pytest.raises(DamagedError):
        Code(np.array(lengths))


def test_a_single_symbol_has_words_of_one_bit() -> None:
    code = Code(np.array([0, 1]))
    assert code.encode(np.full(9, 1, np.int32)) == bytes(2)
    assert code.decode(bytes(2), 9).tolist() == [1] * 9
    with pytest.raises(DamagedError):
        code.decode(b"\x80\0", 9)
