"""Whole numbers in as few bytes as they need: seven bits a byte, the lowest first (LEB128)."""

from firecaffe.compression.fcz.damaged import DamagedError

MOST_BYTES = 9


def varint(value: int) -> bytes:
    """value: from 0 up to 2^63 - 1."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def read_varint(data: bytes | memoryview, start: int) -> tuple[int, int]:
    """Returns the number that begins at `start`, and where the next byte is.

    Raises: DamagedError if it is cut short, too long, or not the shortest way to write it.
    """
    value = 0
    for place in range(MOST_BYTES):
        if start + place >= len(data):
            raise DamagedError("a number is cut short")
        byte = data[start + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            if place and not byte:
                raise DamagedError("a number has a byte that it does not need")
            return value, start + place + 1
    raise DamagedError("a number has too many bytes")
