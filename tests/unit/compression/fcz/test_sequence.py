"""Columns of symbols: what they cost against what was estimated, and Huffman codes bit by bit."""

import heapq
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from firecaffe.compression.fcz.format import BlockWriter, DamagedError
from firecaffe.compression.fcz.mask import View, _cost, shared_bits, write_mask
from firecaffe.compression.fcz.sequence import (
    MAX_BITS,
    STRIDE,
    Adaptive,
    Code,
    Column,
    Huffman,
    Uniform,
    _chunks,
    code_lengths,
)

DRAWN = np.random.default_rng(0)


@pytest.mark.parametrize("alphabet", [2, 16, 256])
@pytest.mark.parametrize("kind", [Uniform, Adaptive, Huffman])
def test_a_column_takes_as_many_bits_as_it_says(kind: Any, alphabet: int) -> None:
    """Ways to write are chosen by such estimates."""
    shares = DRAWN.dirichlet(np.full(alphabet, 0.5))
    symbols = DRAWN.choice(alphabet, 2_000, p=shares).astype(np.int32)
    counts = np.bincount(symbols, minlength=alphabet)
    column: Column = kind(code_lengths(counts) if kind is Huffman else alphabet)
    writer = BlockWriter()
    column.write_table(writer)
    for part in _chunks(len(symbols), column.grows):
        column.put(writer, symbols[part])
    assert column.bits(counts) == pytest.approx(writer.bits, rel=0.02)


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_a_mask_takes_as_many_bits_as_it_says(distance: int) -> None:
    shape = (200, 300)
    kept = (DRAWN.random(shape) < DRAWN.random(300) ** 3).reshape(-1)
    view, writer = View(1, distance=distance), BlockWriter()
    write_mask(writer, view, kept, shape)
    assert _cost(view, kept, shape, kept.size) == pytest.approx(writer.bits / kept.size, rel=0.01)


@pytest.mark.parametrize("distance", [1, 2])
def test_what_a_row_says_of_another_is_their_mutual_information(distance: int) -> None:
    rows = DRAWN.random((60, 40)) < 0.2
    rows[2::3] = rows[1::3] & (DRAWN.random((20, 40)) < 0.9)
    before, after = rows[:-distance].reshape(-1), rows[distance:].reshape(-1)
    both = np.bincount(2 * before + after, minlength=4)
    alone = [np.bincount(each, minlength=2) for each in (before, after)]
    expected = sum(entropy(each, base=2) for each in alone) - entropy(both, base=2)
    assert shared_bits(rows, distance) == pytest.approx(expected, abs=1e-9)


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


@given(COUNTS, st.data())
def test_codes_are_optimal_and_decoded(counts: list[int], data: Any) -> None:
    lengths = code_lengths(np.array(counts))
    assert int(lengths @ counts) == huffman_bits(counts)
    used = [symbol for symbol, count in enumerate(counts) if count]
    if len(used) > 1:
        assert sum(2.0 ** -int(length) for length in lengths if length) == 1
    drawn = data.draw(st.lists(st.sampled_from(used), max_size=4 * STRIDE))
    symbols, code = np.array(drawn, np.int32), Code(lengths)
    sent = code.encode(symbols)
    assert 8 * len(sent) - 8 < int(lengths[symbols].sum()) <= 8 * len(sent)
    assert code.decode(sent, len(symbols)).tolist() == drawn


def test_lengths_are_limited() -> None:
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = code_lengths(np.array(fibonacci))
    assert lengths.max() == MAX_BITS  # without a limit it would be 39
    assert sum(2.0 ** -int(length) for length in lengths) == 1


FOUR = Code(np.array([2, 1, 3, 3]))  # canonical: 10, 0, 110, 111


def test_words_are_canonical() -> None:
    symbols = np.array([0, 1, 2, 3], np.int32)
    assert FOUR.encode(symbols) == bytes([0b10_0_110_11, 0b1_0000000])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=100))
def test_bytes_too_few_or_too_many_are_refused(symbols: list[int]) -> None:
    sent = FOUR.encode(np.array(symbols, np.int32))
    for wrong in (sent[:-1], sent + b"\0"):
        with pytest.raises(DamagedError):
            FOUR.decode(wrong, len(symbols))


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_decoded_or_refused(data: bytes, count: int) -> None:
    try:
        symbols = FOUR.decode(data, count)
    except DamagedError:
        return
    assert len(symbols) == count
    again = FOUR.encode(symbols)
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
