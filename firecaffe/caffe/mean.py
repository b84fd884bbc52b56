"""Read and write mean images: .binaryproto files, as Caffe's `compute_image_mean` writes them."""

from pathlib import Path

from firecaffe.caffe import blob
from firecaffe.caffe.blob import Array
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.wire import opened


def read(path: Path) -> Array:
    """Read one image (C, H, W), blue first as in the file. Raises CaffeError on any other blob."""
    wire = opened(path)
    array = blob.read(wire, 0, len(wire))
    image = array[0] if array.ndim == 4 and len(array) == 1 else array
    if image.ndim != 3 or not image.size:
        raise CaffeError(f"{path}: a blob of shape {array.shape}; expected one image, of C, H, W")
    return image


def write(path: Path, image: Array) -> None:
    """Write a .binaryproto that every Caffe reads. image: of shape (C, H, W)."""
    with path.open("wb") as file:
        file.writelines(blob.fields(image[None], legacy=True))
