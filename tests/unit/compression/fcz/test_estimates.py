"""What a way to write would cost, against what it does cost: ways are chosen by the estimates."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import entropy

from firecaffe.compression.fcz.format import BlockWriter
from firecaffe.compression.fcz.mask import View, _cost, shared_bits, write_mask
from firecaffe.compression.fcz.sequence import (
    Adaptive,
    Column,
    Huffman,
    Uniform,
    _chunks,
    code_lengths,
)

DRAWN = np.random.default_rng(0)


@pytest.mark.parametrize("alphabet", [2, 16, 256])
@pytest.mark.parametrize("kind", [Uniform, Adaptive, Huffman])
def test_a_column_takes_what_it_says(kind: Any, alphabet: int) -> None:
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
def test_a_mask_takes_what_it_says(distance: int) -> None:
    shape = (200, 300)
    by_column = DRAWN.random(300) ** 3
    kept = (DRAWN.random(shape) < by_column).reshape(-1)
    view = View(1, distance=distance)
    writer = BlockWriter()
    write_mask(writer, view, kept, shape)
    assert _cost(view, kept, shape, kept.size) == pytest.approx(writer.bits / kept.size, rel=0.01)


@pytest.mark.parametrize("distance", [1, 2])
def test_what_a_row_tells_of_another_is_their_mutual_information(distance: int) -> None:
    rows = DRAWN.random((60, 40)) < 0.2
    rows[2::3] = rows[1::3] & (DRAWN.random((20, 40)) < 0.9)
    before, after = rows[:-distance].reshape(-1), rows[distance:].reshape(-1)
    both = np.bincount(2 * before + after, minlength=4)
    alone = [np.bincount(each, minlength=2) for each in (before, after)]
    expected = sum(entropy(each, base=2) for each in alone) - entropy(both, base=2)
    assert shared_bits(rows, distance) == pytest.approx(expected, abs=1e-9)
