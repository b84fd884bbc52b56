"""Sequences of integers, with one or more symbols for each, in the cheapest of four ways.

The index of a codebook is one column, the bytes of a float32 are four. Each column has a kind:

    constant   one symbol for all
    uniform    all symbols are equally probable
    adaptive   a range coder with the counts of the symbols before
    huffman    a canonical Huffman code, preceded by its lengths
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import lgamma, log, log2
from typing import Literal

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import BlockReader, BlockWriter, DamagedError, Symbols
from firecaffe.compression.fcz.huffman import MOST_BITS, Code, Ints, code_lengths

How = Literal["best", "huffman", "range"]

LEAST_CHUNK, MOST_CHUNK = 4, 4096
MOST_ALPHABET = 1 << 16

_categorical = constriction.stream.model.Categorical
_uniform = constriction.stream.model.Uniform


# Adaptive columns update their counts before each chunk, so their chunks begin small and grow.
def _chunks(count: int, grows: bool) -> Iterator[slice]:
    done = 0
    while done < count:
        size = max(LEAST_CHUNK, done // 4) if grows else MOST_CHUNK
        size = min(size, MOST_CHUNK, count - done)
        yield slice(done, done + size)
        done += size


class Column:
    kind: int
    grows = False

    @abstractmethod
    def write_table(self, writer: BlockWriter) -> None: ...

    @abstractmethod
    def put(self, writer: BlockWriter, symbols: Symbols) -> None: ...

    @abstractmethod
    def take(self, reader: BlockReader, count: int) -> Symbols: ...

    @abstractmethod
    def bits(self, counts: Ints) -> float:
        """Estimate the bits of symbols with these counts, with the table."""


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

    def write_table(self, writer: BlockWriter) -> None:
        pass

    def put(self, writer: BlockWriter, symbols: Symbols) -> None:
        writer.put(symbols, self._model)

    def take(self, reader: BlockReader, count: int) -> Symbols:
        return reader.take(count, self._model)

    def bits(self, counts: Ints) -> float:
        return int(counts.sum()) * log2(len(counts))


class Adaptive(Column):
    """A symbol that came n times before has the weight 2n + 1 (Krichevsky and Trofimov 1981)."""

    kind = 2
    grows = True

    def __init__(self, alphabet: int) -> None:
        self._weights = np.ones(alphabet)

    @classmethod
    def read(cls, reader: BlockReader, alphabet: int) -> "Adaptive":
        return cls(alphabet)

    def write_table(self, writer: BlockWriter) -> None:
        pass

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
    """Each chunk has the number of its bytes, and then the bytes."""

    kind = 3
    most_bytes = MOST_CHUNK * MOST_BITS // 8 + 1

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._lengths = lengths
        self.code = Code(lengths)

    @classmethod
    def read(cls, reader: BlockReader, alphabet: int) -> "Huffman":
        lengths = Adaptive(MOST_BITS + 1)
        parts = [
            lengths.take(reader, part.stop - part.start) for part in _chunks(alphabet, grows=True)
        ]
        return cls(np.concatenate(parts).astype(np.int64))

    def write_table(self, writer: BlockWriter) -> None:
        lengths = Adaptive(MOST_BITS + 1)
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
        table = Adaptive(MOST_BITS + 1).bits(np.bincount(self._lengths, minlength=MOST_BITS + 1))
        chunks = -(-int(counts.sum()) // MOST_CHUNK)
        bits_per_chunk = log2(self.most_bytes) + 4  # the last byte of a chunk is half empty
        return float(counts @ self._lengths) + table + chunks * bits_per_chunk


KINDS = (Constant, Uniform, Adaptive, Huffman)


def write_sequence(
    writer: BlockWriter, columns: Sequence[Symbols], alphabet: int, how: How
) -> None:
    """Write equal columns of symbols below `alphabet`; nothing without symbols, or for one."""
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
    if not 0 < alphabet <= MOST_ALPHABET:
        raise DamagedError(f"an alphabet has {alphabet} symbols; 1 to {MOST_ALPHABET}")
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
