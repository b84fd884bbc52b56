"""Mean images: .binaryproto files, as `compute_image_mean` writes them.

Source: BVLC/caffe, tools/compute_image_mean.cpp and src/caffe/data_transformer.cpp.
"""

from pathlib import Path

from firecaffe.caffe import blob
from firecaffe.caffe.blob import Array
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.wire import opened


def read(path: Path) -> Array:
    """A mean image, in C, H, W, with the channels in the file's order: blue first.

    Raises: CaffeError, one line, if the file is damaged or holds no single image.
    """
    wire = opened(path)
    found = blob.read(wire, 0, len(wire))
    image = found[0] if found.ndim == 4 and len(found) == 1 else found
    if image.ndim != 3 or not image.size:
        raise CaffeError(f"{path}: a blob of shape {found.shape}; expected one image, of C, H, W")
    return image


def write(path: Path, image: Array) -> None:
    """A .binaryproto that every Caffe reads. image: of shape (C, H, W)."""
    with path.open("wb") as file:
        file.writelines(blob.fields(image[None], legacy=True))
