"""Caffe's arrays in files: BlobProto, mean images, and solver states.

Source: BVLC/caffe, src/caffe/blob.cpp; field numbers of a real Caffe.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import decoded
from firecaffe.caffe.wire import (
    BYTES,
    VARINT,
    Buffer,
    Wire,
    WirePart,
    field,
    opened,
    signed,
    varint,
)

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


def _dims(wire: Wire, shape: WirePart) -> list[int]:
    dims: list[int] = []
    for part in wire.parts(shape.start, shape.stop):
        for dim in wire.varints(part) if part.number == DIM else ():
            dims.append(dim)
            if len(dims) > MOST_AXES:
                raise wire.error(shape.start, f"a blob of more than {MOST_AXES} axes")
    return dims


def _shown(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def read_mean(path: Path) -> Array:
    """Read one image (C, H, W), blue first as in the file. Raises CaffeError on any other blob."""
    wire = opened(path)
    array = read(wire, 0, len(wire))
    image = array[0] if array.ndim == 4 and len(array) == 1 else array
    if image.ndim != 3 or not image.size:
        raise CaffeError(f"{path}: a blob of shape {array.shape}; expected one image, of C, H, W")
    return image


def write_mean(path: Path, image: Array) -> None:
    """Write a .binaryproto that every Caffe reads. image: of shape (C, H, W)."""
    with path.open("wb") as file:
        file.writelines(fields(image[None], legacy=True))


ITERATION, LEARNED_NET, HISTORY, CURRENT_STEP = 1, 2, 3, 4
MOST_BLOBS = 20_000
MOST_PATH_BYTES = 10_000


class SolverState(NamedTuple):
    iteration: int
    learned_net: str
    """The path of the weights on the host that trained them; empty if the file does not say it."""
    current_step: int
    """The number of steps passed of the policy multistep."""
    history: list[Array]
    """The solver's arrays: SGD has one for each parameter that is no copy, its momentum.

    They have the net's order. Solvers with two arrays have all the first, then all the second.
    """


def read_solverstate(path: Path) -> SolverState:
    """Read a .solverstate. Raises CaffeError (one line) if the file is damaged or no such file."""
    wire = opened(path)
    numbers: dict[int, int] = {}
    learned_net, places = "", []
    for part in wire.parts(0, len(wire)):
        if part.kind == VARINT:
            numbers[part.number] = signed(part.value)
        elif part.kind == BYTES and part.number == LEARNED_NET:
            if part.stop - part.start > MOST_PATH_BYTES:
                raise wire.error(part.start, f"a path of more than {MOST_PATH_BYTES:,} bytes")
            learned_net = decoded(wire.text(part))
        elif part.kind == BYTES and part.number == HISTORY:
            places.append(part)
        if len(places) > MOST_BLOBS or len(numbers) > MOST_BLOBS:
            raise wire.error(part.start, f"more than {MOST_BLOBS:,} blobs")
    iteration, step = numbers.get(ITERATION, -1), numbers.get(CURRENT_STEP, 0)
    if iteration < 0 or step < 0:
        raise CaffeError(f"{path}: says no iteration; expected a .solverstate")
    history = [read(wire, place.start, place.stop) for place in places]
    return SolverState(iteration, learned_net, step, history)
