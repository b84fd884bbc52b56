"""A mean image, a binaryproto: what `compute_image_mean` writes.

Source: BVLC/caffe, src/caffe/proto/caffe.proto (message BlobProto).
"""

from pathlib import Path

import numpy as np

from firecaffe.data.caffe_datum import message_of
from firecaffe.data.caffe_transform import Floats
from firecaffe.errors import DataError

FIELDS = (
    ("channels", 2, "INT32"),
    ("height", 3, "INT32"),
    ("width", 4, "INT32"),
    ("data", 5, "FLOAT"),
)


def read_mean(path: Path) -> Floats:
    """C x H x W. Raises: DataError if this is no mean image."""
    from google.protobuf.message import DecodeError

    blob = message_of("BlobProto", FIELDS)()
    try:
        blob.ParseFromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read, {error.strerror}") from error
    except DecodeError as error:
        raise DataError(f"{path}: is no binaryproto, {error}") from error
    shape = (blob.channels, blob.height, blob.width)
    found = np.array(blob.data, np.float32)
    if min(shape) < 1 or found.size != shape[0] * shape[1] * shape[2]:
        raise DataError(f"{path}: holds {found.size} numbers for {shape}; expected a mean image")
    return found.reshape(shape)
