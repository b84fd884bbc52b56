"""The layout of a .fcz file: header, entries of tensors, and blocks of bits with checksums.

One coder encodes all numbers of a block, so that a small section costs fractions of a bit, not
bytes. Each block can be decoded separately, because it has its own coder. Outside blocks, integers
take as few bytes as they need: seven bits per byte, the lowest first (LEB128).

Source: Martin 1979 (range coding), as in the library `constriction`: words of 32 bits, a state of
64, probabilities in units of 2^-24.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import constriction
import numpy as np
from numpy.typing import NDArray

DTYPES = (
    *("float32", "float16", "float64", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool", "complex64"),
)
"""The types of tensors. A file stores a type as its index."""

GAPS, MASK = 0, 1

Patterns = NDArray[Any]


def unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def patterns_of(array: NDArray[Any]) -> Patterns:
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return native.reshape(-1).view(unsigned(native.dtype))


class DamagedError(Exception):
    """The bytes do not follow docs/reference/fcz.md. `read` names the file."""


MAX_BYTES = 9


def varint(value: int) -> bytes:
    """Encode a number from 0 to 2^63 - 1."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def read_varint(data: bytes | memoryview, start: int) -> tuple[int, int]:
    """Return a number and the next offset. Raises DamagedError if not the shortest encoding."""
    value = 0
    for place in range(MAX_BYTES):
        if start + place >= len(data):
            raise DamagedError("a number is cut short")
        byte = data[start + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            if place and not byte:
                raise DamagedError("a number has a byte that it does not need")
            return value, start + place + 1
    raise DamagedError("a number has too many bytes")


MAGIC = b"FCZ"
VERSION = 1

MAX_HEADER = 1 << 24
MAX_TENSORS = 1 << 14
MAX_NETWORK = 1 << 20
"""The maximum bytes of the JSON. Parsing takes many times as much memory."""

MAX_DIMENSIONS = 32
MAX_NAME = 1 << 12
MAX_SPAN = 1 << 62
"""The maximum bytes of a tensor, with dimensions of 0 counted as 1: no array may span more."""

MAX_DECODED = 1 << 32
FEW_DECODED = 1 << 24
MAX_RATIO = 1 << 10
"""The limits of `allowed_bytes`. Trained networks become up to 149 times smaller."""

DICTIONARY = (
    b"layer1.layer2.layer3.layer4.0.downsample.running_meanrunning_varnum_batches_tracked"
    b"features.classifier.expand1x1expand3x3squeezeinceptionconv1.conv2.conv3.ip1.ip2.ip3.fc1.fc2."
    b'fc3.bn1.{"model":{"args":{"in_channels":,"num_classes":10},"name":"lenet"},'
    b".weight\x00\x02.bias\x00\x01"
)


@dataclass(frozen=True)
class Outline:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Header:
    network: dict[str, Any]
    tensors: Sequence[Outline]
    body_bytes: int


def allowed_bytes(file_bytes: int) -> int:
    """Return the maximum total size of the decoded tensors of a file of this size."""
    # Zeros take almost no bytes, so a tiny file could request any amount of memory.
    return min(MAX_DECODED, max(FEW_DECODED, MAX_RATIO * file_bytes))


def header_bytes(network: Mapping[str, Any], tensors: Sequence[Outline], body_bytes: int) -> bytes:
    """Encode everything before the first block. Raises ValueError or TypeError if not JSON."""
    text = json.dumps(network, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if len(text.encode()) > MAX_NETWORK:
        raise ValueError(f"it takes {len(text.encode())} bytes; at most {MAX_NETWORK}")
    parts = [_counted(text.encode()), varint(len(tensors))]
    for tensor in tensors:
        parts += [_counted(tensor.name.encode()), bytes([DTYPES.index(tensor.dtype)])]
        parts += [varint(len(tensor.shape)), *map(varint, tensor.shape)]
    plain = b"".join(parts)
    if len(plain) > MAX_HEADER:
        raise ValueError(f"the header takes {len(plain)} bytes; at most {MAX_HEADER}")
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)
    stored = deflate.compress(plain) + deflate.flush()
    if len(stored) >= len(plain):
        stored = plain
    start = MAGIC + bytes([VERSION])
    start += varint(len(stored)) + varint(len(plain)) + varint(body_bytes)
    return start + zlib.crc32(stored, zlib.crc32(start)).to_bytes(4, "little") + stored


def read_header(file: BinaryIO, file_bytes: int) -> Header:
    """Read everything before the first block, and leave the file there. Raises DamagedError."""
    start = file.read(len(MAGIC) + 1 + 3 * MAX_BYTES + 4)
    if start[: len(MAGIC)] != MAGIC:
        raise DamagedError(f"it begins with {start[: len(MAGIC)]!r}, not with {MAGIC!r}")
    if len(start) == len(MAGIC):
        raise DamagedError("the file is cut short")
    if start[len(MAGIC)] != VERSION:
        raise DamagedError(f"it is of version {start[len(MAGIC)]}; this program reads {VERSION}")
    place = len(MAGIC) + 1
    stored_bytes, place = read_varint(start, place)
    plain_bytes, place = read_varint(start, place)
    body_bytes, place = read_varint(start, place)
    if not 0 < stored_bytes <= plain_bytes <= MAX_HEADER:
        raise DamagedError(f"a header of {plain_bytes} bytes; at most {MAX_HEADER}")
    whole = place + 4 + stored_bytes + body_bytes
    if file_bytes != whole:
        raise DamagedError(f"it has {file_bytes} bytes, and says that it has {whole}")
    file.seek(place)
    stated, stored = file.read(4), file.read(stored_bytes)
    if zlib.crc32(stored, zlib.crc32(start[:place])) != int.from_bytes(stated, "little"):
        raise DamagedError("the header's checksum is not that of its bytes")
    plain = stored if stored_bytes == plain_bytes else _inflate(stored, plain_bytes)
    network, tensors = _parse(plain)
    return Header(network, tensors, body_bytes)


def _counted(data: bytes) -> bytes:
    return varint(len(data)) + data


def _inflate(stored: bytes, plain_bytes: int) -> bytes:
    inflate = zlib.decompressobj(-15, DICTIONARY)
    try:
        plain = inflate.decompress(stored, plain_bytes + 1)
    except zlib.error as error:
        raise DamagedError(f"the header cannot be inflated ({error})") from error
    if len(plain) != plain_bytes or not inflate.eof or inflate.unused_data:
        raise DamagedError("the header is longer or shorter than it says")
    return plain


class _Plain:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def number(self, most: int, what: str) -> int:
        value, self.place = read_varint(self.data, self.place)
        if value > most:
            raise DamagedError(f"{value} {what}; at most {most}")
        return value

    def text(self, most: int, what: str) -> str:
        count = self.number(most, f"bytes of {what}")
        content = self.data[self.place : self.place + count]
        self.place += count
        if len(content) != count:
            raise DamagedError(f"{what} is cut short")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise DamagedError(f"{what} is no UTF-8") from error


def _parse(plain: bytes) -> tuple[dict[str, Any], list[Outline]]:
    rest = _Plain(plain)
    text = rest.text(MAX_NETWORK, "the network")
    try:
        network = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the network is no JSON ({error})") from error
    if not isinstance(network, dict):
        raise DamagedError("the network is no JSON object")
    tensors = []
    for _ in range(rest.number(MAX_TENSORS, "tensors")):
        name = rest.text(MAX_NAME, "a tensor's name")
        dtype = rest.number(len(DTYPES) - 1, "as a tensor's type")
        dimensions = rest.number(MAX_DIMENSIONS, "dimensions of a tensor")
        shape = tuple(rest.number(1 << 62, "as a dimension") for _ in range(dimensions))
        span = prod(max(1, dimension) for dimension in shape) * np.dtype(DTYPES[dtype]).itemsize
        if span > MAX_SPAN:
            raise DamagedError(f"a tensor's dimensions span {span:,} bytes; at most {MAX_SPAN:,}")
        tensors.append(Outline(name, DTYPES[dtype], shape))
    if rest.place != len(plain):
        raise DamagedError("the header has bytes after its last tensor")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise DamagedError("two tensors have the same name")
    return network, tensors


Symbols = NDArray[np.int32]
Model = Any

MAX_AT_ONCE = 1 << 14

FULL_WORDS, MAX_WORDS = 1 << 14, 1 << 15
"""A block ends at FULL_WORDS. A call adds at most 24 bits a symbol, so MAX_WORDS suffices."""

FULL_SYMBOLS, MAX_SYMBOLS = 1 << 20, 1 << 21
"""Limits of a block's symbols, in the same way."""

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
        num_words, (_, interval) = self._encoder.pos()
        return float(self._finished_bits + 32 * num_words + 64 - math.log2(interval))

    def put(self, symbols: Symbols, model: Model, *parameters: NDArray[np.float64]) -> None:
        if not len(symbols):
            return
        self._encoder.encode(symbols, model, *parameters)
        self._symbols += len(symbols)
        if self._encoder.num_words() >= FULL_WORDS or self._symbols >= FULL_SYMBOLS:
            self.flush()

    def number(self, value: int, below: int) -> None:
        """Encode a number from 0 to `below` - 1. If `below` is 1, nothing is written."""
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
        compressed = self._encoder.get_compressed().astype("<u4")
        payload = compressed.tobytes()
        counts = varint(self._symbols) + varint(len(compressed))
        if self._file is not None:
            sum_ = zlib.crc32(payload, zlib.crc32(counts))
            self._file.write(counts + sum_.to_bytes(4, "little") + payload)
        self._encoder = _queue.RangeEncoder()
        self._symbols = 0


class BlockReader:
    """Decodes the output of a `BlockWriter`, by the same sequence of calls."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        """`num_bytes`: the bytes of the file that may be read from its current position."""
        self._file = file
        self._left_bytes = num_bytes
        self._left_symbols = 0
        self._decoder: Any = None
        self.near_rows = 0

    def take(self, count: int, model: Model, *parameters: NDArray[np.float64]) -> Symbols:
        """Decode at most MAX_AT_ONCE symbols. Raises DamagedError if the bytes are invalid."""
        if not count:
            return np.empty(0, np.int32)
        if not self._left_symbols:
            self._next_block()
        if count > self._left_symbols:
            raise DamagedError("a block has fewer symbols than are needed")
        self._left_symbols -= count
        try:
            symbols: Symbols = self._decoder.decode(model, *(parameters or (count,)))
        except AssertionError as error:  # raised by constriction for an impossible state
            raise DamagedError("a block's symbols cannot be decoded") from error
        if not self._left_symbols and not self._decoder.maybe_exhausted():
            raise DamagedError("a block has more bytes than its symbols need")
        return symbols

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
        if self._left_symbols or self._left_bytes:
            raise DamagedError("more follows after the last tensor")

    def _next_block(self) -> None:
        start = self._read(min(2 * MAX_BYTES + 4, self._left_bytes))
        symbols, place = read_varint(start, 0)
        num_words, place = read_varint(start, place)
        if not 0 < symbols <= MAX_SYMBOLS:
            raise DamagedError(f"a block says that it has {symbols} symbols; at most {MAX_SYMBOLS}")
        if num_words > MAX_WORDS:
            raise DamagedError(f"a block says that it has {num_words} words; at most {MAX_WORDS}")
        counts, stated, rest = start[:place], start[place : place + 4], start[place + 4 :]
        missing = 4 * num_words - len(rest)
        if len(stated) < 4 or missing > self._left_bytes:
            raise DamagedError("a block is cut short")
        if missing < 0:
            self._file.seek(missing, 1)
            self._left_bytes -= missing
        payload = rest[: 4 * num_words] + self._read(max(missing, 0))
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
