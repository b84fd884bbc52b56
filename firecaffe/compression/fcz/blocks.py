"""Symbols through a range coder, cut into blocks with counts and a checksum; see docs/fcz.md.

All of a file's numbers go through one coder, so that a small section costs fractions of a bit and
not bytes. Each block can be decoded by itself, because the coder begins anew in it.

Source: Martin 1979 (range coding), as in the library `constriction`: words of 32 bits, a state of
64, probabilities in units of 2^-24.
"""

import math
import zlib
from typing import Any, BinaryIO

import constriction
import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.header import MOST_BYTES, DamagedError, read_varint, varint

Symbols = NDArray[np.int32]
Model = Any

MOST_AT_ONCE = 1 << 14

FULL_WORDS, MOST_WORDS = 1 << 14, 1 << 15
"""A block ends at FULL_WORDS. A call adds at most 24 bits a symbol, so none exceeds MOST_WORDS."""

FULL_SYMBOLS, MOST_SYMBOLS = 1 << 20, 1 << 21
"""The limits of a block's symbols, in the same way."""

DIGIT = 1 << 16
"""Numbers are sent in digits of 16 bits, the lowest first."""

_queue = constriction.stream.queue
_uniform = constriction.stream.model.Uniform


class BlockWriter:
    def __init__(self, file: BinaryIO | None = None) -> None:
        """`file` None: only measure the size."""
        self._file = file
        self._encoder = _queue.RangeEncoder()
        self._symbols = 0
        self._finished_bits = 0.0
        self.near_rows = 0
        """Rows of the file's masks so far that use neighbors; see `mask`."""

    @property
    def bits(self) -> float:
        words, (_, interval) = self._encoder.pos()
        return float(self._finished_bits + 32 * words + 64 - math.log2(interval))

    def put(self, symbols: Symbols, model: Model, *parameters: NDArray[np.float64]) -> None:
        if not len(symbols):
            return
        self._encoder.encode(symbols, model, *parameters)
        self._symbols += len(symbols)
        if self._encoder.num_words() >= FULL_WORDS or self._symbols >= FULL_SYMBOLS:
            self.flush()

    def number(self, value: int, below: int) -> None:
        """Encode a number from 0 to `below` - 1. If that is 0, nothing is written."""
        digits, sizes = [], []
        while below > 1:
            digits.append(value % DIGIT)
            sizes.append(min(below, DIGIT))
            value //= DIGIT
            below = -(-below // DIGIT)
        for digit, size in zip(digits, sizes, strict=True):
            self.put(np.array([digit], np.int32), _uniform(size))

    def flush(self) -> None:
        if not self._symbols:
            return
        self._finished_bits = self.bits
        words = self._encoder.get_compressed().astype("<u4")
        payload = words.tobytes()
        counts = varint(self._symbols) + varint(len(words))
        if self._file is not None:
            sum_ = zlib.crc32(payload, zlib.crc32(counts))
            self._file.write(counts + sum_.to_bytes(4, "little") + payload)
        self._encoder = _queue.RangeEncoder()
        self._symbols = 0


class BlockReader:
    """Decodes what a `BlockWriter` has written, by the same sequence of calls."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        """`num_bytes`: how much of the file may be read from its current position."""
        self._file = file
        self._left_bytes = num_bytes
        self._left_symbols = 0
        self._decoder: Any = None
        self.near_rows = 0

    def take(self, count: int, model: Model, *parameters: NDArray[np.float64]) -> Symbols:
        """Decode at most MOST_AT_ONCE symbols. Raises DamagedError if the bytes do not fit."""
        if not count:
            return np.empty(0, np.int32)
        if not self._left_symbols:
            self._next_block()
        if count > self._left_symbols:
            raise DamagedError("a block has fewer symbols than are needed")
        self._left_symbols -= count
        try:
            found: Symbols = self._decoder.decode(model, *(parameters or (count,)))
        except AssertionError as error:  # raised by constriction for an impossible state
            raise DamagedError("a block's symbols cannot be decoded") from error
        if not self._left_symbols and not self._decoder.maybe_exhausted():
            raise DamagedError("a block has more bytes than its symbols need")
        return found

    def number(self, below: int) -> int:
        """Decode a number from 0 to `below` - 1. Raises DamagedError."""
        value, unit, most = 0, 1, below
        while below > 1:
            (digit,) = self.take(1, _uniform(min(below, DIGIT)))
            value += unit * int(digit)
            unit *= DIGIT
            below = -(-below // DIGIT)
        if value and value >= most:
            raise DamagedError(f"a number is {value}, and must be below {most}")
        return value

    def finish(self) -> None:
        """Raise DamagedError if symbols or bytes are left."""
        if self._left_symbols or self._left_bytes:
            raise DamagedError("more follows after the last tensor")

    def _next_block(self) -> None:
        start = self._read(min(2 * MOST_BYTES + 4, self._left_bytes))
        symbols, place = read_varint(start, 0)
        words, place = read_varint(start, place)
        if not 0 < symbols <= MOST_SYMBOLS:
            raise DamagedError(
                f"a block says that it has {symbols} symbols; at most {MOST_SYMBOLS}"
            )
        if words > MOST_WORDS:
            raise DamagedError(f"a block says that it has {words} words; at most {MOST_WORDS}")
        counts, stated, rest = start[:place], start[place : place + 4], start[place + 4 :]
        missing = 4 * words - len(rest)
        if len(stated) < 4 or missing > self._left_bytes:
            raise DamagedError("a block is cut short")
        if missing < 0:
            self._file.seek(missing, 1)
            self._left_bytes -= missing
        payload = rest[: 4 * words] + self._read(max(missing, 0))
        if zlib.crc32(payload, zlib.crc32(counts)) != int.from_bytes(stated, "little"):
            raise DamagedError("a block's checksum is not that of its bytes")
        self._decoder = _queue.RangeDecoder(np.frombuffer(payload, "<u4").astype(np.uint32))
        self._left_symbols = symbols

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise DamagedError("the file is cut short")
        self._left_bytes -= count
        return data
