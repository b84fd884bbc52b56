"""Caffe's arrays in files: BlobProto, mean images, weights in HDF5, and solver states.

Source: BVLC/caffe, src/caffe/blob.cpp; field numbers of a real Caffe.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from firecaffe.caffe.wire import BYTES, VARINT, Buffer, Part, Wire, field, signed, varint

LEGACY = (1, 2, 3, 4)
"""Field numbers of num, channels, height and width, which older files have instead of `shape`."""
DATA, SHAPE, DOUBLE_DATA = 5, 7, 8
DIM = 1
MOST_AXES = 32
MOST_DIM = 2**31 - 1
MOST_PIECES = 10_000
"""The most fields that the numbers of one blob may be split into."""

Array = NDArray[np.float32]


def read(wire: Wire, start: int, stop: int) -> Array:
    """Read a blob in the file's shape. Raises CaffeError if it is damaged or its sizes disagree."""
    legacy: dict[int, int] = {}
    dims: list[int] = []
    pieces: dict[int, list[NDArray[np.floating]]] = {DATA: [], DOUBLE_DATA: []}
    for part in wire.parts(start, stop):
        if part.number in LEGACY and part.kind == VARINT:
            legacy[part.number] = signed(part.value)
        elif part.number == SHAPE and part.kind == BYTES:
            dims += _dims(wire, part)
        elif part.number in pieces:
            piece = wire.fixed(part, 4 if part.number == DATA else 8)
            if piece is not None:
                pieces[part.number].append(piece)
            if len(pieces[part.number]) > MOST_PIECES:
                raise wire.error(part.start, f"numbers in more than {MOST_PIECES:,} pieces")
    shape = tuple(legacy.get(axis, 0) for axis in LEGACY) if legacy else tuple(dims)
    numbers = pieces[DOUBLE_DATA] if any(map(len, pieces[DOUBLE_DATA])) else pieces[DATA]
    count = sum(map(len, numbers))
    if len(shape) > MOST_AXES or any(not 0 <= dim <= MOST_DIM for dim in shape):
        raise wire.error(start, f"a blob of shape {_shown(shape)}")
    if prod(shape) != count:
        raise wire.error(start, f"a blob of shape {_shown(shape)} with {count:,} numbers")
    array = np.empty(shape, np.float32)
    flat, at = array.reshape(-1), 0
    with np.errstate(over="ignore"):  # a double beyond float32 is infinite, as in Caffe
        for piece in numbers:
            flat[at : at + len(piece)] = piece
            at += len(piece)
    return array


def fields(array: Array, legacy: bool = False) -> list[Buffer]:
    """Encode a blob without copying its numbers. legacy: with the four sizes of older files."""
    numbers = np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8)
    data = field(DATA, [numbers.data])
    if legacy:
        axes = zip(LEGACY, array.shape, strict=True)
        return [part for axis, size in axes for part in field(axis, size)] + data
    return [*field(SHAPE, field(DIM, b"".join(map(varint, array.shape)))), *data]


def _dims(wire: Wire, shape: Part) -> list[int]:
    dims: list[int] = []
    for part in wire.parts(shape.start, shape.stop):
        for dim in wire.varints(part) if part.number == DIM else ():
            dims.append(dim)
            if len(dims) > MOST_AXES:
                raise wire.error(shape.start, f"a blob of more than {MOST_AXES} axes")
    return dims


def _shown(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
