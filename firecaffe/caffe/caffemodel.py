"""Read and write .caffemodel files; those of every age, and HDF5, can be read.

Source: BVLC/caffe, src/caffe/net.cpp (CopyTrainedLayersFrom) and src/caffe/util/upgrade_proto.cpp;
field numbers from a real Caffe.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from firecaffe.caffe import blob, hdf5
from firecaffe.caffe.blob import Array
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import decoded
from firecaffe.caffe.wire import BYTES, Buffer, Part, Wire, field, opened

NET_NAME = 1
MOST_LAYERS = 10_000
MOST_BLOBS = 20_000
MOST_NAME_BYTES = 1_000
MOST_MESSAGE_BYTES = 2**31 - 1


class Form(NamedTuple):
    """The field numbers of a layer in one age; `inner` holds a layer of the age before."""

    name: int
    blobs: int
    inner: int = 0


LAYER, LAYERS = 100, 2
FORMS = {LAYER: Form(name=1, blobs=7), LAYERS: Form(name=4, blobs=6, inner=1)}
V0 = Form(name=1, blobs=50)
TYPE = 2


class Layer(NamedTuple):
    name: str
    type: str
    blobs: Sequence[Array]


def read(path: Path) -> dict[str, list[Array]]:
    """Read the blobs of each layer that has some, in Caffe's order and the file's shapes.

    At most twice the file's size is held. If a name occurs twice, the last counts, as in Caffe.
    Raises CaffeError (one line) if the file is damaged or no such file.
    """
    if hdf5.is_one(path):
        return hdf5.weights(path)
    wire = opened(path)
    blobs_by_layer: dict[str, list[Array]] = {}
    ages, num_layers, num_blobs = set(), 0, 0
    for part in wire.parts(0, len(wire)):
        if part.number not in FORMS or part.kind != BYTES:
            continue
        ages.add(part.number)
        num_layers += 1
        name, blobs = _layer(wire, part)
        num_blobs += len(blobs)
        if num_layers > MOST_LAYERS or num_blobs > MOST_BLOBS:
            raise wire.error(
                part.start, f"more than {MOST_LAYERS:,} layers or {MOST_BLOBS:,} blobs"
            )
        if blobs:
            blobs_by_layer[name] = [blob.read(wire, stored.start, stored.stop) for stored in blobs]
    if not ages:
        raise CaffeError(f"{path}: holds no layers; expected a .caffemodel")
    if len(ages) > 1:
        raise CaffeError(f"{path}: has layers of two ages, which Caffe refuses")
    return blobs_by_layer


def write(path: Path, layers: Sequence[Layer], name: str = "") -> None:
    """Write a .caffemodel. Raises CaffeError if it would be too large for protobuf; OSError."""
    parts = [*field(NET_NAME, name.encode()), *_written(layers)]
    size = sum(map(len, parts))
    if size > MOST_MESSAGE_BYTES:
        raise CaffeError(
            f"{path}: would have {size:,} bytes; protobuf reads {MOST_MESSAGE_BYTES:,}"
        )
    with path.open("wb") as file:
        file.writelines(parts)


def _written(layers: Sequence[Layer]) -> Iterator[Buffer]:
    names = FORMS[LAYER]
    for layer in layers:
        heading = [*field(names.name, layer.name.encode()), *field(TYPE, layer.type.encode())]
        blobs = [part for one in layer.blobs for part in field(names.blobs, blob.fields(one))]
        yield from field(LAYER, [*heading, *blobs])


def _layer(wire: Wire, layer: Part) -> tuple[str, list[Part]]:
    form = FORMS[layer.number]
    name, blobs, inner = _within(wire, layer, form)
    if inner:
        name, blobs, _ = _within(wire, inner[-1], V0)
    return name, blobs


def _within(wire: Wire, layer: Part, form: Form) -> tuple[str, list[Part], list[Part]]:
    name, blobs, inner = "", [], []
    for part in wire.parts(layer.start, layer.stop):
        if part.kind != BYTES:
            continue
        if part.number == form.name:
            if part.stop - part.start > MOST_NAME_BYTES:
                raise wire.error(part.start, f"a name of more than {MOST_NAME_BYTES:,} bytes")
            name = decoded(wire.text(part))
        elif part.number == form.blobs:
            blobs.append(part)
            if len(blobs) > MOST_BLOBS:
                raise wire.error(part.start, f"more than {MOST_BLOBS:,} blobs")
        elif form.inner and part.number == form.inner:
            inner = [part]
    return name, blobs, inner
