"""Sequences of integers in the cheapest of four codings, one of them a canonical Huffman code.

Sources: Huffman 1952; Schwartz and Kallick 1964 (canonical codes); Larmore and Hirschberg 1990
(package-merge: the shortest code with words up to a limit), used if a word would exceed the limit.

Indices into a codebook are one column; the bytes of float32 are four. Each column has a kind:

    constant   all symbols are equal
    uniform    all symbols are equally probable
    adaptive   a range coder with the counts of earlier symbols
    huffman    a canonical Huffman code, preceded by its word lengths
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import lgamma, log, log2
from typing import Any, Literal

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import BlockReader, BlockWriter, DamagedError, Symbols

MAX_BITS = 16
STRIDE = 32
"""Decoding runs in parallel from places this many symbols apart."""

Ints = NDArray[np.int64]


def code_lengths(counts: Ints) -> Ints:
    """Return the bits of each symbol's word: 0 if it does not occur, 1 if it is the only symbol."""
    lengths = np.zeros(len(counts), np.int64)
    used = np.flatnonzero(counts)
    if len(used) < 2:
        lengths[used] = 1
        return lengths
    lengths[used] = _depths(counts[used].tolist())
    return lengths if lengths.max() <= MAX_BITS else _limited(counts, used)


def _depths(counts: list[int]) -> list[int]:
    # Merges the two rarest nodes; of equal ones, the older.
    heap = [(count, place) for place, count in enumerate(counts)]
    heapify(heap)
    parents = [0] * (2 * len(counts) - 1)
    for node in range(len(counts), 2 * len(counts) - 1):
        one, left = heappop(heap)
        two, right = heap[0]
        parents[left] = parents[right] = node
        heapreplace(heap, (one + two, node))
    depths = [0] * len(parents)
    for node in range(len(parents) - 2, -1, -1):
        depths[node] = depths[parents[node]] + 1
    return depths[: len(counts)]


def _limited(counts: Ints, used: Ints) -> Ints:
    # Package-merge.
    coins: list[tuple[int, tuple[int, ...]]] = sorted(
        (int(counts[symbol]), (int(symbol),)) for symbol in used
    )
    packages = coins
    for _ in range(MAX_BITS - 1):
        pairs = zip(packages[0::2], packages[1::2], strict=False)
        packages = sorted([*coins, *((a[0] + b[0], a[1] + b[1]) for a, b in pairs)])
    taken = chain.from_iterable(symbols for _, symbols in packages[: 2 * len(used) - 2])
    return np.bincount(np.fromiter(taken, np.int64), minlength=len(counts))


def entropy_bytes(counts: NDArray[Any]) -> float:
    counts = counts[counts > 0]
    total = counts.sum()
    return float((counts * np.log2(total / counts)).sum()) / 8 if len(counts) else 0.0


class Code:
    """A canonical code: words of equal length are consecutive numbers, in symbol order."""

    def __init__(self, lengths: Ints) -> None:
        """Raise DamagedError if Kraft's sum is not 1, except for a single symbol of one bit."""
        used = np.flatnonzero(lengths)
        sizes = lengths[used]
        if sizes.size and int(sizes.max()) > MAX_BITS:
            raise DamagedError(f"a Huffman code has a word of {sizes.max()} bits")
        room = int((1 << (MAX_BITS - sizes)).sum())
        alone = len(used) == 1 and int(sizes[0]) == 1
        if room != 1 << MAX_BITS and not alone:
            raise DamagedError("the lengths of a Huffman code do not add up to 1 (Kraft's sum)")
        order = used[np.argsort(sizes, kind="stable")]
        spans = 1 << (MAX_BITS - lengths[order])
        starts = np.cumsum(spans) - spans
        self._lengths = lengths
        self._words = np.zeros(len(lengths), np.int64)
        self._words[order] = starts >> (MAX_BITS - lengths[order])
        # Indexed by the next 16 bits: the symbol, and the length of its word.
        whole = 1 << MAX_BITS
        self._symbol_at = np.repeat(order.astype(np.uint16), spans)
        self._length_at = np.repeat(lengths[order].astype(np.uint8), spans)
        if alone:  # no word begins with 1
            self._symbol_at = np.resize(self._symbol_at, whole)
            self._length_at = np.concatenate([self._length_at, np.zeros_like(self._length_at)])

    def encode(self, symbols: NDArray[np.int32]) -> bytes:
        """Concatenate the words, highest bit first. Zeros fill the last byte."""
        sizes = self._lengths[symbols]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        below = np.repeat(ends, sizes) - 1 - np.arange(total)
        bits = (np.repeat(self._words[symbols], sizes) >> below) & 1
        return np.packbits(bits.astype(np.uint8)).tobytes()

    def decode(self, data: bytes, count: int) -> NDArray[np.int32]:
        """Decode `count` symbols, which must take all bytes. Raises DamagedError if they do not."""
        if not (count and data):
            if count or data:
                raise DamagedError("a Huffman section has bytes and no symbols, or none and some")
            return np.empty(0, np.int32)
        # A word begins at the end of the previous one. So compute, for each bit, the end of a word
        # that would begin there, and by doubling the end of STRIDE words. These jumps give places
        # from which decoding can run in parallel.
        total = 8 * len(data)
        padded = np.frombuffer(data + bytes(2), np.uint8).astype(np.uint32)
        three = padded[:-2] << 16 | padded[1:-1] << 8 | padded[2:]
        ahead = np.empty(total, np.uint16)  # the next 16 bits from each bit
        for bit in range(8):
            ahead[bit::8] = three >> (8 - bit)
        length = self._length_at[ahead]
        # The place after the last bit points to itself; jumps beyond the end point to it.
        after = np.full(total + 1, total, np.int32)
        np.minimum(np.arange(total, dtype=np.int32) + length, total, out=after[:total])
        jump = after
        for _ in range(STRIDE.bit_length() - 1):
            jump = jump[jump]
        places = np.empty(-(-count // STRIDE), np.int32)
        place = 0
        for number in range(len(places)):
            places[number] = place
            place = int(jump[place])
        symbols = np.empty((STRIDE, len(places)), np.int32)
        begun = np.empty((STRIDE, len(places)), np.int32)
        for number in range(STRIDE):
            begun[number] = places
            symbols[number] = self._symbol_at[ahead[np.minimum(places, total - 1)]]
            places = after[places]
        starts = begun.T.reshape(-1)[:count]
        last = int(starts[-1])
        end = last + int(length[last]) if last < total else total + 1
        if not total - 8 < end <= total or not length[np.minimum(starts, total - 1)].all():
            raise DamagedError("a Huffman section is longer or shorter than its words")
        return symbols.T.reshape(-1)[:count]


How = Literal["best", "huffman", "range"]

MIN_CHUNK, MAX_CHUNK = 4, 4096
MAX_ALPHABET = 1 << 16

_categorical = constriction.stream.model.Categorical
_uniform = constriction.stream.model.Uniform


# Adaptive columns update their counts before each chunk, so chunks start small and grow.
def _chunks(count: int, grows: bool) -> Iterator[slice]:
    done = 0
    while done < count:
        size = max(MIN_CHUNK, done // 4) if grows else MAX_CHUNK
        size = min(size, MAX_CHUNK, count - done)
        yield slice(done, done + size)
        done += size


class Column:
    kind: int
    grows = False

    def write_table(self, writer: BlockWriter) -> None:
        """Write the parameters that `read` needs; by default none."""

    @abstractmethod
    def put(self, writer: BlockWriter, symbols: Symbols) -> None: ...

    @abstractmethod
    def take(self, reader: BlockReader, count: int) -> Symbols: ...

    @abstractmethod
    def bits(self, counts: Ints) -> float:
        """Estimate the bits of symbols with these counts, including the table."""


class Constant(Column):
    kind = 0

    def __init__(self, symbol: int, alphabet: int) -> None:
        self._symbol, self._alphabet = symbol, alphabet

    @classmethod
    def read(cls, reader: BlockReader, alphabet: int) -> "Constant":
        return cls(reader.number(alphabet), alphabet)

    def write_table(self, writer: BlockWriter) -> None:
        writer.number(self._symbol, self._alphabet)

    def put(self, writer: BlockWriter, symbols: Symbols) -> None:
        pass

    def take(self, reader: BlockReader, count: int) -> Symbols:
        return np.full(count, self._symbol, np.int32)

    def bits(self, counts: Ints) -> float:
        return log2(len(counts))


class Uniform(Column):
    kind = 1

    def __init__(self, alphabet: int) -> None:
        self._model = _uniform(alphabet)

    @classmethod
    def read(cls, reader: BlockReader, alphabet: int) -> "Uniform":
        return cls(alphabet)

    def put(self, writer: BlockWriter, symbols: Symbols) -> None:
        writer.put(symbols, self._model)

    def take(self, reader: BlockReader, count: int) -> Symbols:
        return reader.take(count, self._model)

    def bits(self, counts: Ints) -> float:
        return int(counts.sum()) * log2(len(counts))


class Adaptive(Column):
    """After n occurrences a symbol has the weight 2n + 1 (Krichevsky and Trofimov 1981)."""

    kind = 2
    grows = True

    def __init__(self, alphabet: int) -> None:
        self._weights = np.ones(alphabet)

    @classmethod
    def read(cls, reader: BlockReader, alphabet: int) -> "Adaptive":
        return cls(alphabet)

    def put(self, writer: BlockWriter, symbols: Symbols) -> None:
        writer.put(symbols, _categorical(self._weights, perfect=False))
        self._count(symbols)

    def take(self, reader: BlockReader, count: int) -> Symbols:
        symbols = reader.take(count, _categorical(self._weights, perfect=False))
        self._count(symbols)
        return symbols

    def bits(self, counts: Ints) -> float:
        half = len(counts) / 2
        logs = lgamma(int(counts.sum()) + half) - lgamma(half)
        logs -= sum(lgamma(count + 0.5) - lgamma(0.5) for count in counts[counts > 0].tolist())
        return logs / log(2)

    def _count(self, symbols: Symbols) -> None:
        self._weights += 2 * np.bincount(symbols, minlength=len(self._weights))


class Huffman(Column):
    """Each chunk is the number of its bytes, then the bytes."""

    kind = 3
    most_bytes = MAX_CHUNK * MAX_BITS // 8 + 1

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._lengths = lengths
        self.code = Code(lengths)

    @classmethod
    def read(cls, reader: BlockReader, alphabet: int) -> "Huffman":
        lengths = Adaptive(MAX_BITS + 1)
        parts = [
            lengths.take(reader, part.stop - part.start) for part in _chunks(alphabet, grows=True)
        ]
        return cls(np.concatenate(parts).astype(np.int64))

    def write_table(self, writer: BlockWriter) -> None:
        lengths = Adaptive(MAX_BITS + 1)
        for part in _chunks(len(self._lengths), grows=True):
            lengths.put(writer, self._lengths[part].astype(np.int32))

    def put(self, writer: BlockWriter, symbols: Symbols) -> None:
        data = np.frombuffer(self.code.encode(symbols), np.uint8).astype(np.int32)
        writer.number(len(data), self.most_bytes)
        writer.put(data, _uniform(256))

    def take(self, reader: BlockReader, count: int) -> Symbols:
        data = reader.take(reader.number(self.most_bytes), _uniform(256))
        return self.code.decode(data.astype(np.uint8).tobytes(), count)

    def bits(self, counts: Ints) -> float:
        table = Adaptive(MAX_BITS + 1).bits(np.bincount(self._lengths, minlength=MAX_BITS + 1))
        chunks = -(-int(counts.sum()) // MAX_CHUNK)
        bits_per_chunk = log2(self.most_bytes) + 4  # the last byte of a chunk is half empty
        return float(counts @ self._lengths) + table + chunks * bits_per_chunk


KINDS = (Constant, Uniform, Adaptive, Huffman)


def write_sequence(
    writer: BlockWriter, columns: Sequence[Symbols], alphabet: int, how: How
) -> None:
    """Write columns of equal length, of symbols below `alphabet`; nothing if no choice is left."""
    count = len(columns[0])
    if not count or alphabet < 2:
        return
    chosen = []
    for symbols in columns:
        column = _cheapest(symbols, alphabet, how)
        writer.number(column.kind, len(KINDS))
        column.write_table(writer)
        chosen.append(column)
    for part in _chunks(count, any(column.grows for column in chosen)):
        for column, symbols in zip(chosen, columns, strict=True):
            column.put(writer, symbols[part])


def read_sequence(
    reader: BlockReader, num_columns: int, count: int, alphabet: int
) -> Iterator[list[Symbols]]:
    """Yield the columns' symbols chunk by chunk. Raises DamagedError."""
    if not 0 < alphabet <= MAX_ALPHABET:
        raise DamagedError(f"an alphabet has {alphabet} symbols; 1 to {MAX_ALPHABET}")
    if alphabet < 2:
        for part in _chunks(count, grows=False):
            yield [np.zeros(part.stop - part.start, np.int32)] * num_columns
        return
    columns = [
        KINDS[reader.number(len(KINDS))].read(reader, alphabet)
        for _ in range(num_columns if count else 0)
    ]
    for part in _chunks(count, any(column.grows for column in columns)):
        yield [column.take(reader, part.stop - part.start) for column in columns]


def _cheapest(symbols: Symbols, alphabet: int, how: How) -> Column:
    if (symbols == symbols[0]).all():
        return Constant(int(symbols[0]), alphabet)
    counts = np.bincount(symbols, minlength=alphabet)
    ways: list[Column] = []
    if how != "huffman":
        ways += [Uniform(alphabet), Adaptive(alphabet)]
    if how != "range":
        ways.append(Huffman(code_lengths(counts)))
    return min(ways, key=lambda way: way.bits(counts))
