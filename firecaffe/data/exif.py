"""How a photo is to be turned, by what its camera has written into it (EXIF's orientation)."""

import struct

from PIL import Image
from torch import Tensor

from firecaffe.data.decode import JPEG, PILLOW_ERRORS, decode, open_image

IGNORE, APPLY = "ignore", "apply"
EXIF = (IGNORE, APPLY)
"""What is done about it: images are read as they are stored, or turned as they are to be seen."""

UPRIGHT = 1
"""The orientation of an image that is stored as it is to be seen; also of one that says none."""

ORIENTATION = 0x0112

MARKS = (b"Exif\0\0", b"eXIf", b"EXIF", b"Raw profile type")
"""One of them is in a JPEG, PNG or WebP that has EXIF."""


def decoded(content: bytes, exif: str) -> Tensor:
    """An image as `decode` gives it, turned if `exif`, a row of EXIF, says so.

    Raises: BrokenSampleError, without a name, if this is no whole image.
    """
    image_CHW = decode(content)
    return upright(image_CHW, orientation(content)) if exif == APPLY else image_CHW


def orientation(content: bytes) -> int:
    """1 to 8. content: an encoded image, or its beginning. 1 if it says none that there is."""
    if not any(mark in content for mark in MARKS):
        return UPRIGHT
    try:
        with open_image(content) as image:
            found = image.getexif().get(ORIENTATION, UPRIGHT)
    except PILLOW_ERRORS:
        return UPRIGHT
    return found if found in TURNS else UPRIGHT


def upright(image_CHW: Tensor, orientation: int) -> Tensor:
    """The image as it is to be seen."""
    is_transposed, flipped = TURNS[orientation]
    if is_transposed:
        image_CHW = image_CHW.transpose(1, 2)
    return image_CHW.flip(flipped) if flipped else image_CHW


TURNS: dict[int, tuple[bool, tuple[int, ...]]] = {
    1: (False, ()),
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}
"""By orientation: whether rows and columns change places, and which are then reversed.

Source: CIPA DC-008 (EXIF), tag 0x0112.
"""


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """A JPEG without EXIF that says an orientation."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    segment = exif.tobytes()
    return b"".join((JPEG, b"\xff\xe1", struct.pack(">H", len(segment) + 2), segment, jpeg[2:]))
