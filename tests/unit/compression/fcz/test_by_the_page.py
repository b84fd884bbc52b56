"""docs/reference/fcz.md is enough to decode a file: a decoder from the page alone, in plain Python,
one symbol at a time, gives what was written.
"""

import json
import re
import struct
import zlib
from bisect import bisect_right
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firecaffe.compression.fcz import CODES, write
from firecaffe.compression.fcz.format import DICTIONARY, DTYPES
from firecaffe.compression.fcz.mask import FACTORS, cheapest_view
from firecaffe.compression.fcz.sequence import How, entropy_bytes
from tests.unit.compression.fcz.made import NETWORK, Tensors, bytes_of, pruned, small, smooth

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "fcz.md").read_text()
_LINES = PAGE.partition("The dictionary is these four lines")[2].split("\n\n")[1]
DICTIONARY_OF_PAGE = b"".join(
    line.removeprefix("    ").encode().decode("unicode_escape").encode("latin-1")
    for line in _LINES.splitlines()
)
TYPES = "float32 float16 float64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64"
SIZES = (4, 2, 8, 8, 4, 2, 1, 8, 4, 2, 1, 1, 8)
ONE, WHOLE = 1 << 24, 1 << 64
SIXTY_FOURTHS = (0, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512)


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, count: int) -> bytes:
        self.place += count
        assert self.place <= len(self.data)
        return self.data[self.place - count : self.place]

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


class Coder:
    """The range coder over all blocks."""

    def __init__(self, data: Bytes) -> None:
        self.data, self.left = data, 0

    def begin(self) -> None:
        start = self.data.place
        self.left, count = self.data.varint(), self.data.varint()
        numbers = self.data.data[start : self.data.place]
        stated = self.data.take(4)
        payload = self.data.take(4 * count)
        assert zlib.crc32(numbers + payload) == int.from_bytes(stated, "little")
        self.words = list(struct.unpack(f"<{count}I", payload))
        self.lower, self.range = 0, WHOLE - 1
        self.point = self.next_word() << 32 | self.next_word()

    def next_word(self) -> int:
        return self.words.pop(0) if self.words else 0

    def symbol(self, bounds: list[int]) -> int:
        """bounds: c(0), c(1), …, c(n)."""
        if not self.left:
            self.begin()
        self.left -= 1
        scale = self.range >> 24
        quantile = (self.point - self.lower) % WHOLE // scale
        assert quantile < ONE
        found = bisect_right(bounds, quantile) - 1
        self.lower = (self.lower + scale * bounds[found]) % WHOLE
        self.range = scale * (bounds[found + 1] - bounds[found])
        if self.range < 1 << 32:
            self.lower = (self.lower << 32) % WHOLE
            self.range <<= 32
            self.point = (self.point << 32) % WHOLE | self.next_word()
        if not self.left:
            assert not self.words
            assert (self.point - self.lower) % WHOLE < (1 << 33) - 1
        return found

    def uniform(self, n: int) -> int:
        return self.symbol([symbol * (ONE // n) for symbol in range(n)] + [ONE])

    def weighted(self, weights: list[float]) -> int:
        n, total, before = len(weights), 0.0, 0.0
        for weight in weights:
            total += weight
        scale = (ONE - n) / total
        bounds = []
        for symbol, weight in enumerate(weights):
            bounds.append(int(before * scale) + symbol)
            before += weight
        return self.symbol([*bounds, ONE])

    def number(self, below: int) -> int:
        value, unit = 0, 1
        while below > 1:
            value += unit * self.uniform(min(below, 1 << 16))
            unit <<= 16
            below = -(-below // (1 << 16))
        return value


class Adaptive:
    def __init__(self, alphabet: int) -> None:
        self.counts = [0] * alphabet

    def chunk(self, coder: Coder, count: int) -> list[int]:
        weights = [2.0 * n + 1 for n in self.counts]
        symbols = [coder.weighted(weights) for _ in range(count)]
        for symbol in symbols:
            self.counts[symbol] += 1
        return symbols


class Huffman:
    def __init__(self, lengths: list[int]) -> None:
        order = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
        self.words: dict[str, int] = {}
        word = before = 0
        for length, symbol in order:
            word <<= length - before
            self.words[format(word, f"0{length}b")] = symbol
            word, before = word + 1, length

    def chunk(self, coder: Coder, count: int) -> list[int]:
        size = coder.number(8193)
        bits = "".join(format(coder.uniform(256), "08b") for _ in range(size))
        symbols: list[int] = []
        word, place = "", 0
        while len(symbols) < count:
            word += bits[place]
            place += 1
            if word in self.words:
                symbols.append(self.words[word])
                word = ""
        assert len(bits) - place < 8
        return symbols


def chunks(count: int, grows: bool) -> list[int]:
    sizes: list[int] = []
    while (done := sum(sizes)) < count:
        size = max(4, done // 4) if grows else 4096
        sizes.append(min(size, 4096, count - done))
    return sizes


def sequence(coder: Coder, columns: int, count: int, alphabet: int) -> list[list[int]]:
    """All symbols, column by column."""
    if not count or alphabet == 1:
        return [[0] * count for _ in range(columns)]
    ways: list[Any] = []
    for _ in range(columns):
        way = coder.number(4)
        if way == 0:
            ways.append(coder.number(alphabet))
        elif way == 1:
            ways.append(None)
        elif way == 2:
            ways.append(Adaptive(alphabet))
        else:
            table = Adaptive(17)
            sizes = chunks(alphabet, grows=True)
            ways.append(Huffman([each for size in sizes for each in table.chunk(coder, size)]))
    found: list[list[int]] = [[] for _ in range(columns)]
    for size in chunks(count, any(isinstance(way, Adaptive) for way in ways)):
        for way, column in zip(ways, found, strict=True):
            if isinstance(way, int):
                column += [way] * size
            elif way is None:
                column += [coder.uniform(alphabet) for _ in range(size)]
            else:
                column += way.chunk(coder, size)
    return found


def distances(coder: Coder, size: int) -> list[int]:
    bits = coder.number(15) + 1
    count = coder.number(size) + 1
    skips, place, kept = (1 << bits) - 1, 0, []
    for symbol in sequence(coder, 1, count, 1 << bits)[0]:
        place += symbol
        if symbol != skips:
            kept.append(place)
            place += 1
    return kept


def clipped(chance: float) -> float:
    return min(max(chance, 2.0**-20), 1 - 2.0**-20)


Near = tuple[list[list[int]], list[int]]
"""The places of a mask's matrix, row by row; and the rows that neighbors are before."""


def mask(coder: Coder, shape: tuple[int, ...], count: int) -> tuple[list[int], Near]:
    leading, transposed, inverted, strength, d = map(coder.number, (len(shape) + 1, 2, 2, 16, 65))
    rows, columns = prod(shape[:leading]), prod(shape[leading:])
    size = rows * columns
    places = [[row * columns + column for column in range(columns)] for row in range(rows)]
    if transposed:
        places = [list(each) for each in zip(*places, strict=True)]
        rows, columns = columns, rows
    m = (size - count if inverted else count) / size
    a = 2.0 ** (strength - 2)
    factors = [SIXTY_FOURTHS[each] / 64 for each in sequence(coder, 1, rows, 16)[0]]
    near = [] if d == 0 else [1] if d == 1 else sorted({1, d - 1, d, d + 1})
    group = 1 if d else max(1, min(rows // 64, 4096 // columns))
    kept_of, rows_before = [0.0] * columns, 0.0
    seen, expected = [0] * 2 ** len(near), [0.0] * 2 ** len(near)
    is_kept: list[list[int]] = []
    for first in range(0, rows, group):
        bits_of = []
        bases = [(kept + a * m) / (rows_before + a) for kept in kept_of]
        for row in range(first, min(rows, first + group)):
            bits = [0] * columns
            counted = []
            for column in range(columns if factors[row] else 0):
                chance = clipped(factors[row] * bases[column])
                if d:
                    context = sum(
                        is_kept[row - each][column] << place
                        for place, each in enumerate(near)
                        if each <= row
                    )
                    lift = (seen[context] + 8) / (expected[context] + 8)
                    counted.append((context, chance))
                    chance = clipped(chance * lift)
                bits[column] = coder.weighted([1 - chance, chance])
            for bit, (context, chance) in zip(bits, counted, strict=bool(counted)):
                seen[context] += bit
                expected[context] += int(chance * 2**20) / 2**20
            bits_of.append(bits)
        for offset, bits in enumerate(bits_of):
            rows_before += factors[first + offset]
            kept_of = [kept + bit for kept, bit in zip(kept_of, bits, strict=True)]
            is_kept.append([bit ^ inverted for bit in bits])
    pairs = zip(places, is_kept, strict=True)
    kept = sorted(p for ps, ks in pairs for p, k in zip(ps, ks, strict=True) if k)
    return kept, (places, near)


def by_signs(coder: Coder, kept: list[int], near: Near, book: list[bytes]) -> list[bytes]:
    places, rows_before = near
    signs: dict[int, int] = {}
    values: dict[int, bytes] = {}
    contexts = [Adaptive(len(book)) for _ in range(3)]
    there = set(kept)
    for number, row in enumerate(places):
        groups: list[list[int]] = [[], [], []]
        for column, place in enumerate(row):
            if place in there:
                around = [places[number - each][column] for each in rows_before if each <= number]
                total = sum(signs.get(each, 0) for each in around)
                groups[(total > 0) - (total < 0) + 1].append(place)
        for group, context in zip(groups, contexts, strict=True):
            symbols = context.chunk(coder, len(group))
            values |= {place: book[symbol] for place, symbol in zip(group, symbols, strict=True)}
        new = there.intersection(row)
        signs |= {place: -1 if values[place][-1] >> 7 else 1 for place in new}
    return [values[place] for place in kept]


def as_bytes(coder: Coder, count: int, size: int, is_float32: bool) -> list[bytes]:
    is_half = is_float32 and coder.number(2)
    columns = sequence(coder, 2 if is_half else size, count, 256)
    found = [bytes(each) for each in zip(*columns, strict=True)]
    if is_half:
        found = [struct.pack("<f", *struct.unpack("<e", each)) for each in found]
    return found


def decode(data: bytes) -> tuple[Any, dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """The network, and each tensor's type, shape and bytes."""
    rest = Bytes(data)
    assert rest.take(4) == b"FCZ\1"
    stored, plain, body = rest.varint(), rest.varint(), rest.varint()
    start = data[: rest.place]
    stated = rest.take(4)
    header = rest.take(stored)
    assert zlib.crc32(start + header) == int.from_bytes(stated, "little")
    assert len(data) - rest.place == body
    if stored != plain:
        header = zlib.decompressobj(-15, DICTIONARY_OF_PAGE).decompress(header)
    assert len(header) == plain
    words = Bytes(header)
    network = json.loads(words.take(words.varint()))
    outlines = []
    for _ in range(words.varint()):
        name = words.take(words.varint()).decode()
        (kind,) = words.take(1)
        outlines.append((name, kind, tuple(words.varint() for _ in range(words.varint()))))
    coder = Coder(rest)
    tensors = {}
    for name, kind, shape in outlines:
        dtype, size, is_float32 = TYPES.split()[kind], SIZES[kind], kind == 0
        total = prod(shape)
        kept = coder.number(total + 1)
        places, near = list(range(kept)), ([[0]], [1])
        if 0 < kept < total:
            if coder.number(2):
                places, near = mask(coder, shape, kept)
            else:
                places = distances(coder, total)
        values: list[bytes] = []
        if kept and (way := coder.number(3)):
            distinct = coder.number(1 << 13) + 1
            book = as_bytes(coder, distinct, size, is_float32)
            if way == 2:
                values = by_signs(coder, places, near, book)
            else:
                values = [book[place] for place in sequence(coder, 1, kept, distinct)[0]]
        elif kept:
            values = as_bytes(coder, kept, size, is_float32)
        elements = [bytes(size)] * total
        for place, value in zip(places, values, strict=True):
            elements[place] = value
        tensors[name] = dtype, shape, b"".join(elements)
    assert rest.place == len(data)
    assert not coder.left
    return network, tensors


TENSORS: dict[str, Tensors] = {
    "small": small(),
    "many": {"a": pruned((70, 90), 0.1, 30), "b": pruned((5000,), 0.01, 9000)},
    "neighbors": {"ip1.weight": smooth(12, 15, 60), "rest": pruned((30, 30), 0.9, 3)},
    "types": {dtype: np.arange(40).reshape(5, 8).astype(dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", TENSORS)
def test_the_page_decodes_it(name: str, code: How) -> None:
    network, found = decode(bytes_of(TENSORS[name], code))
    assert network == NETWORK
    assert list(found) == list(TENSORS[name])
    for each, array in TENSORS[name].items():
        assert found[each] == (array.dtype.name, array.shape, array.tobytes()), each


def test_neighbors_are_found() -> None:
    """Lines have 15 pixels: the neighbors are about 15 before, and the mask is smaller."""
    weights = smooth(12, 15, 60)
    view, bits = cheapest_view(weights.reshape(-1) != 0, weights.shape, 1.0) or pytest.fail("none")
    assert view.transposed
    assert 14 <= view.distance <= 16
    share = float((weights != 0).mean())
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert bits < 0.95 * entropy


def test_signs_of_neighbors_are_used(tmp_path: Path) -> None:
    weights = smooth(12, 15, 60)
    report = write(tmp_path / "net.fcz", {"w": weights}, {})
    (tensor,) = report.tensors
    _, counts = np.unique(weights[weights != 0], return_counts=True)
    assert tensor.symbol_bytes < 0.6 * entropy_bytes(counts)


def test_the_page_has_the_tables() -> None:
    assert DICTIONARY_OF_PAGE == DICTIONARY  # of which a small header uses but a part
    assert f"its type: {', '.join(DTYPES)}, from 0" in PAGE
    *most, last = [f"{each * 64:.0f}" for each in FACTORS]
    assert f"{', '.join(most)} and {last} sixty-fourths" in " ".join(PAGE.split())
    assert re.findall(r"## The format, version (\d)", PAGE) == ["1"]
