"""Read trained weights in HDF5, as Caffe writes them (src/caffe/net.cpp, ToHDF5)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from firecaffe.caffe.blob import Array
from firecaffe.caffe.message import CaffeError
from firecaffe.files import open_regular

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MOST_ITEMS = 50_000


def is_one(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(SIGNATURE)) == SIGNATURE


def weights(path: Path) -> dict[str, list[Array]]:
    """Read each layer's blobs: numbered arrays below /data. Raises CaffeError (one line)."""
    with _opened(path) as file:
        layers = _layers(path, file)
        _check_blobs(path, [blob for blobs in layers.values() for blob in blobs.values()])
        return {
            name: [np.asarray(blobs[number][()], np.float32) for number in range(len(blobs))]
            for name, blobs in layers.items()
        }


def _layers(path: Path, file: Any) -> dict[str, dict[int, Any]]:
    import h5py

    layers: dict[str, dict[int, Any]] = {}
    count = 0

    def visit(name: str | bytes, item: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_ITEMS:
            raise CaffeError(f"{path}: more than {MOST_ITEMS:,} layers and blobs")
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


def _check_blobs(path: Path, blobs: Sequence[Any]) -> None:
    """Check that the blobs need no more bytes than the file has, as Caffe does not compress."""
    for blob in blobs:
        if blob.dtype.kind not in "fiu" or blob.external or blob.is_virtual:
            raise CaffeError(f"{path}: {blob.name} itself holds no numbers")
    needed = sum(max(blob.nbytes, blob.dtype.itemsize * prod(blob.chunks or ())) for blob in blobs)
    if needed > path.stat().st_size:
        raise CaffeError(f"{path}: its blobs would have {needed:,} bytes, more than the file")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise CaffeError(f"{path}: HDF5 files need h5py; pip install 'firecaffe[hdf5]'") from None
    try:
        open_regular(path).close()  # HDF5's library would wait for a pipe
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        said = " ".join(str(error).split())
        raise CaffeError(f"{path}: not a whole HDF5 file, {said}") from error
