"""Files for the tests of .fcz: small ones with each way to code, and their bytes."""

import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz import read, write
from firecaffe.compression.fcz.format import MAGIC, read_varint
from firecaffe.compression.fcz.sequence import How

Tensors = dict[str, NDArray[Any]]

NETWORK = {"model": {"name": "lenet", "args": {}}, "num_classes": 10}


def pruned(shape: tuple[int, ...], keep: float, values: int, seed: int = 0) -> NDArray[np.float32]:
    """A tensor that keeps elements at random places, of so many values."""
    drawn = np.random.default_rng(seed)
    tensor = np.zeros(shape, np.float32)
    places = drawn.random(shape) < keep
    codebook = drawn.standard_normal(values).astype(np.float32)
    tensor[places] = codebook[drawn.binomial(values - 1, 0.5, int(places.sum()))]
    return tensor


def smooth(height: int, width: int, neurons: int) -> NDArray[np.float32]:
    """Weights of neurons that keep the largest tenth of a smooth field over an image, as signs."""
    field = np.random.default_rng(0).standard_normal((neurons, height, width))
    for axis in (1, 2):
        field = field + np.roll(field, 1, axis) + np.roll(field, 2, axis)
    field[np.abs(field) < np.quantile(np.abs(field), 0.9)] = 0
    return np.sign(field).astype(np.float32).reshape(neurons, height * width)


def small() -> Tensors:
    """A few tensors, with a codebook, bytes, masks, distances, signs of neighbors, and nothing."""
    drawn = np.random.default_rng(1)
    return {
        "smooth": smooth(9, 9, 32),
        "ip1.weight": pruned((12, 20), 0.2, 4),
        "ip1.bias": drawn.standard_normal(12).astype(np.float32),
        "conv.weight": pruned((4, 3, 3, 3), 0.8, 8),
        "zeros": np.zeros((3, 5), np.float32),
        "count": np.array(7),
    }


def bytes_of(tensors: Tensors, code: How = "best") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.fcz")
        write(path, tensors, NETWORK, code=code)
        return path.read_bytes()


def decoded(data: bytes, **limits: int) -> Tensors:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "net.fcz")
        path.write_bytes(data)
        with read(path, **limits) as file:
            return dict(file.tensors())


def header_place(data: bytes) -> tuple[int, int]:
    """Where the header's checksum is, and how many bytes the header behind it has."""
    stored, place = read_varint(data, len(MAGIC) + 1)
    for _ in ("its plain bytes", "the body's bytes"):
        _, place = read_varint(data, place)
    return place, stored


def body_start(data: bytes) -> int:
    """Where the first block begins."""
    place, stored = header_place(data)
    return place + 4 + stored


def with_sums(data: bytes) -> bytes:
    """The same bytes with checksums that are right, if the numbers before them can be read."""
    place, stored = header_place(data)
    mended = bytearray(data)
    start, size = 0, stored
    while True:
        payload = data[place + 4 : place + 4 + size]
        sum_ = zlib.crc32(payload, zlib.crc32(data[start:place]))
        mended[place : place + 4] = sum_.to_bytes(4, "little")
        start = place + 4 + size
        if start >= len(data):
            return bytes(mended[: len(data)])
        _, place = read_varint(data, start)
        words, place = read_varint(data, place)
        size = 4 * words


def same(found: Tensors, expected: Tensors) -> bool:
    """Whether names, types, shapes and bits are the same."""
    ours, theirs = (
        [(name, each.dtype, each.shape, each.tobytes()) for name, each in tensors.items()]
        for tensors in (found, expected)
    )
    return ours == theirs
