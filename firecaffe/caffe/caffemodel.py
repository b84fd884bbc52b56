"""Files of trained weights: .caffemodel, read in each historical form and written; HDF5, read.

Source: BVLC/caffe, src/caffe/net.cpp (CopyTrainedLayersFrom) and src/caffe/util/upgrade_proto.cpp;
field numbers from a real Caffe.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from firecaffe.caffe import binary
from firecaffe.caffe.binary import BYTES, Array, Buffer, Wire, WirePart, field, opened
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import decoded
from firecaffe.files import open_regular

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MAX_HDF5_ITEMS = 50_000


def is_hdf5(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(SIGNATURE)) == SIGNATURE


def read_hdf5(path: Path) -> dict[str, list[Array]]:
    """Read each layer's blobs: numbered arrays below /data. Raises CaffeError (one line)."""
    with _open_hdf5(path) as file:
        layers = _hdf5_layers(path, file)
        _check_hdf5(path, [blob for blobs in layers.values() for blob in blobs.values()])
        return {
            name: [np.asarray(blobs[number][()], np.float32) for number in range(len(blobs))]
            for name, blobs in layers.items()
        }


def _hdf5_layers(path: Path, file: Any) -> dict[str, dict[int, Any]]:
    import h5py

    layers: dict[str, dict[int, Any]] = {}
    count = 0

    def visit(name: str | bytes, item: Any) -> None:
        nonlocal count
        count += 1
        if count > MAX_HDF5_ITEMS:
            raise CaffeError(f"{path}: more than {MAX_HDF5_ITEMS:,} layers and blobs")
        if isinstance(item, h5py.Dataset):
            layer, _, number = name.rpartition("/") if isinstance(name, str) else ("", "", "")
            if not number.isdecimal():
                raise CaffeError(f"{path}: {item.name} is no numbered blob of a layer")
            layers.setdefault(layer, {})[int(number)] = item

    data = file.get("data")
    if not isinstance(data, h5py.Group):
        raise CaffeError(f"{path}: has no group /data; expected weights of Caffe's")
    data.visititems(visit)
    for layer, blobs in layers.items():
        if sorted(blobs) != list(range(len(blobs))):
            raise CaffeError(
                f"{path}: {layer} has the blobs {sorted(blobs)!s:.80}; a blob that is shared "
                "stands with another layer only; expected a .caffemodel"
            )
    return layers


def _check_hdf5(path: Path, blobs: Sequence[Any]) -> None:
    """Check that the blobs need no more bytes than the file has, since Caffe does not compress."""
    for array in blobs:
        if array.dtype.kind not in "fiu" or array.external or array.is_virtual:
            raise CaffeError(f"{path}: {array.name} itself holds no numbers")
    needed = sum(
        max(array.nbytes, array.dtype.itemsize * prod(array.chunks or ())) for array in blobs
    )
    if needed > path.stat().st_size:
        raise CaffeError(f"{path}: its blobs would have {needed:,} bytes, more than the file")


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise CaffeError(f"{path}: HDF5 files need h5py; pip install 'firecaffe[hdf5]'") from None
    try:
        open_regular(path).close()  # a pipe would block HDF5's library
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        said = " ".join(str(error).split())
        raise CaffeError(f"{path}: not a whole HDF5 file, {said}") from error


NET_NAME = 1
MAX_LAYERS = 10_000
MAX_BLOBS = 20_000
MAX_NAME_BYTES = 1_000
MAX_MESSAGE_BYTES = 2**31 - 1


class LayerForm(NamedTuple):
    """Field numbers of a layer in one form of the file; `inner` holds a layer of the older form."""

    name: int
    blobs: int
    inner: int = 0


LAYER, LAYERS = 100, 2
FORMS = {LAYER: LayerForm(name=1, blobs=7), LAYERS: LayerForm(name=4, blobs=6, inner=1)}
V0 = LayerForm(name=1, blobs=50)
TYPE = 2


class TrainedLayer(NamedTuple):
    name: str
    type: str
    blobs: Sequence[Array]


def read(path: Path) -> dict[str, list[Array]]:
    """Read each layer's blobs, in Caffe's order; of a name the last counts. Raises CaffeError."""
    if is_hdf5(path):
        return read_hdf5(path)
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
        if num_layers > MAX_LAYERS or num_blobs > MAX_BLOBS:
            raise wire.error(part.start, f"more than {MAX_LAYERS:,} layers or {MAX_BLOBS:,} blobs")
        if blobs:
            blobs_by_layer[name] = [
                binary.read_blob(wire, stored.start, stored.stop) for stored in blobs
            ]
    if not ages:
        raise CaffeError(f"{path}: holds no layers; expected a .caffemodel")
    if len(ages) > 1:
        raise CaffeError(f"{path}: has layers of two ages, which Caffe refuses")
    return blobs_by_layer


def write(path: Path, layers: Sequence[TrainedLayer], name: str = "") -> None:
    """Write a .caffemodel. Raises CaffeError if it would be too large for protobuf; OSError."""
    parts = [*field(NET_NAME, name.encode()), *_written(layers)]
    size = sum(map(len, parts))
    if size > MAX_MESSAGE_BYTES:
        raise CaffeError(f"{path}: would have {size:,} bytes; protobuf reads {MAX_MESSAGE_BYTES:,}")
    with path.open("wb") as file:
        file.writelines(parts)


def _written(layers: Sequence[TrainedLayer]) -> Iterator[Buffer]:
    names = FORMS[LAYER]
    for layer in layers:
        heading = [*field(names.name, layer.name.encode()), *field(TYPE, layer.type.encode())]
        blobs = [
            part for one in layer.blobs for part in field(names.blobs, binary.blob_fields(one))
        ]
        yield from field(LAYER, [*heading, *blobs])


def _layer(wire: Wire, layer: WirePart) -> tuple[str, list[WirePart]]:
    form = FORMS[layer.number]
    name, blobs, inner = _within(wire, layer, form)
    if inner:
        name, blobs, _ = _within(wire, inner[-1], V0)
    return name, blobs


def _within(
    wire: Wire, layer: WirePart, form: LayerForm
) -> tuple[str, list[WirePart], list[WirePart]]:
    name, blobs, inner = "", [], []
    for part in wire.parts(layer.start, layer.stop):
        if part.kind != BYTES:
            continue
        if part.number == form.name:
            if part.stop - part.start > MAX_NAME_BYTES:
                raise wire.error(part.start, f"a name of more than {MAX_NAME_BYTES:,} bytes")
            name = decoded(wire.text(part))
        elif part.number == form.blobs:
            blobs.append(part)
            if len(blobs) > MAX_BLOBS:
                raise wire.error(part.start, f"more than {MAX_BLOBS:,} blobs")
        elif form.inner and part.number == form.inner:
            inner = [part]
    return name, blobs, inner
