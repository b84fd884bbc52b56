"""Trained weights in HDF5, as Caffe writes them with `snapshot_format: HDF5`.

Source: BVLC/caffe, src/caffe/net.cpp (ToHDF5).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from firecaffe.caffe.blob import Array
from firecaffe.caffe.message import CaffeError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
MOST_ITEMS = 50_000


def is_one(path: Path) -> bool:
    """Whether the file begins as HDF5 does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(SIGNATURE)) == SIGNATURE


def weights(path: Path) -> dict[str, list[Array]]:
    """The blobs of each layer that has some: the numbered arrays below /data, by their group.

    Raises: CaffeError, one line, if the file is damaged, has no weights, or h5py is not installed.
    """
    with _opened(path) as file:
        found = _layers(path, file)
        most_bytes = path.stat().st_size
        return {
            name: [_array(path, blobs[number], most_bytes) for number in range(len(blobs))]
            for name, blobs in found.items()
        }


def _layers(path: Path, file: Any) -> dict[str, dict[int, Any]]:
    import h5py

    found: dict[str, dict[int, Any]] = {}
    count = 0

    def visit(name: str, item: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_ITEMS:
            raise CaffeError(f"{path}: more than {MOST_ITEMS:,} layers and blobs")
        if isinstance(item, h5py.Dataset):
            layer, _, number = name.rpartition("/")
            if not number.isdecimal():
                raise CaffeError(f"{path}: {item.name} is no numbered blob of a layer")
            found.setdefault(layer, {})[int(number)] = item

    data = file.get("data")
    if not isinstance(data, h5py.Group):
        raise CaffeError(f"{path}: has no group /data; expected weights of Caffe's")
    data.visititems(visit)
    for layer, blobs in found.items():
        if sorted(blobs) != list(range(len(blobs))):
            raise CaffeError(
                f"{path}: {layer} has the blobs {sorted(blobs)}; a blob that is shared stands "
                "with another layer only; expected a .caffemodel"
            )
    return found


def _array(path: Path, item: Any, most_bytes: int) -> Array:
    if item.dtype.kind not in "fiu":
        raise CaffeError(f"{path}: {item.name} holds no numbers")
    if item.nbytes > most_bytes:
        raise CaffeError(
            f"{path}: {item.name} would have {item.nbytes:,} bytes, more than the file"
        )
    return np.asarray(item[()], np.float32)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise CaffeError(f"{path}: HDF5 files need h5py; pip install 'firecaffe[hdf5]'") from None
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CaffeError(f"{path}: not a whole HDF5 file, {error}") from error
