"""Decodes images: libjpeg-turbo those that it can, Pillow the others.

Both let go of the interpreter's lock, so threads decode side by side. Pillow takes PNG, WebP and
BMP, JPEGs in CMYK, and what libjpeg-turbo calls damaged but can be read. Nothing is scaled while it
is decoded: that is faster and costs 8 dB.

How a photo is to be turned, by what its camera has written into it (EXIF's orientation).
"""

import io
import struct

import numpy as np
import simplejpeg
import torch
from PIL import (
    BmpImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)
from torch import Tensor
from torch.nn.functional import interpolate

from firecaffe.data.dataset import BrokenSampleError

MOST_PIXELS = 1 << 28
"""Pixels of one image, 0.8 GB decoded; cameras have up to 200 million."""

FEW_PIXELS, PIXELS_OF_BYTE = 1 << 24, 256
"""An image may have so few pixels whatever its file's size, and more if that has a byte for each
256: others are taken for decompression bombs. Photographs have 2 to 30 pixels for a byte, and
scanned pages and masks, which take the least, hardly more than 16 million.
"""

STRIP_PIXELS = 1 << 20
"""What is turned into RGB at a time, so that an image is not there twice."""

MOST_PROPORTION = 8
"""Ratio of an image's sides: more of it is never looked at, and would fill the memory."""

JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"

DEEP_BITS = 16
"""Bits of a value, of those PNGs that do not have bytes."""

CONVERTED_MODES = ("CMYK", "YCCK")
"""Color spaces that Pillow turns into RGB."""

FORMATS = {
    "JPEG": JpegImagePlugin,
    "PNG": PngImagePlugin,
    "WEBP": WebPImagePlugin,
    "BMP": BmpImagePlugin,
}
"""Formats that Pillow may take a file for, and who enters them into `Image.OPEN`; others would
start programs.
"""

PILLOW_ERRORS = (
    OSError,
    SyntaxError,  # a broken PNG
    ValueError,
    IndexError,
    TypeError,
    struct.error,
    Image.DecompressionBombError,  # of its WebP alone
)


def decode(content: bytes) -> Tensor:
    """RGB pixels, uint8 of 3 x H x W, in rows of whole pixels (channels last) in memory.

    Raises: BrokenSampleError, without a name, if this is no whole image.
    """
    if not content:
        raise BrokenSampleError("not a whole image: it is empty")
    if content[:2] == JPEG:
        try:
            rows, columns, space, _ = simplejpeg.decode_jpeg_header(content)
            check_size(rows, columns, len(content))
            if space not in CONVERTED_MODES:
                return torch.from_numpy(simplejpeg.decode_jpeg(content)).permute(2, 0, 1)
        except ValueError:
            pass  # Pillow has the last word
    try:
        with open_image(content) as image:
            columns, rows = image.size
            check_size(rows, columns, len(content))
            pixels = _pixels(image)
    except PILLOW_ERRORS as error:
        reason = str(error).split(" <_io")[0]
        raise BrokenSampleError(f"not a whole image: {reason}") from error
    return pixels.permute(2, 0, 1)


def bits_of(content: bytes) -> int:
    """Bits of one value of a pixel. content: an encoded image, or its beginning."""
    return content[24] if content[:8] == PNG and len(content) > 24 else 8


def open_image(content: bytes) -> Image.Image:
    """Reads the header, as `Image.open` does without its limit of 179 million pixels: that one is
    the whole process's, and stays as it is for whoever else uses Pillow. MOST_PIXELS is ours.
    """
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(content[:16]):
            return factory(io.BytesIO(content), "")
    raise UnidentifiedImageError(f"no {', '.join(FORMATS)}")


def _pixels(image: Image.Image) -> Tensor:
    """Rows x columns x 3."""
    columns, rows = image.size
    height = max(1, STRIP_PIXELS // columns)
    if height >= rows:
        content = bytearray(_rgb(image).tobytes())
        return torch.frombuffer(content, dtype=torch.uint8).view(rows, columns, 3)
    pixels = torch.empty(rows, columns, 3, dtype=torch.uint8)
    for top in range(0, rows, height):
        bottom = min(rows, top + height)
        pixels[top:bottom] = _pixels(image.crop((0, top, columns, bottom)))
    return pixels


def _rgb(image: Image.Image) -> Image.Image:
    """Pillow cuts the 16 bits of a gray PNG off at 255; of 65,535 they are meant. Those of a color
    it reads as they are meant.
    """
    if image.mode in ("I", "I;16", "I;16B"):
        values = np.asarray(image, dtype=np.int64).clip(0, 65535) // 257
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def check_size(rows: int, columns: int, file_bytes: int) -> None:
    """Raises: BrokenSampleError if a file of so many bytes is not decoded to so many pixels."""
    most = min(MOST_PIXELS, max(FEW_PIXELS, PIXELS_OF_BYTE * file_bytes))
    if not 0 < rows * columns <= most:
        raise BrokenSampleError(
            f"not a whole image: {rows} x {columns} pixels, and more than {most / 1e6:.0f} million "
            f"are not decoded of {file_bytes:,} bytes"
        )


def scale(image_CHW: Tensor, rows: int, columns: int) -> Tensor:
    """Scales bilinearly with antialiasing, as Pillow does (63 dB and more between the two)."""
    if image_CHW.shape[1:] == (rows, columns):
        return image_CHW
    # torch's fast path is for channels last, which one image shows by its strides alone; a copy of
    # a part of an image costs less than what it saves.
    image_1CHW = image_CHW.permute(1, 2, 0).contiguous().unsqueeze(0).permute(0, 3, 1, 2)
    scaled = interpolate(image_1CHW, size=(rows, columns), mode="bilinear", antialias=True)
    return scaled.squeeze(0)


def scale_shorter_side(image_CHW: Tensor, side: int) -> Tensor:
    """Scales the shorter side to `side` and keeps the proportions. Of an image whose sides have a
    ratio of more than MOST_PROPORTION, the middle.
    """
    _, rows, columns = image_CHW.shape
    most = MOST_PROPORTION * min(rows, columns)
    if max(rows, columns) > most:
        top, left = max(0, (rows - most) // 2), max(0, (columns - most) // 2)
        image_CHW = image_CHW[:, top : top + most, left : left + most]
        _, rows, columns = image_CHW.shape
    if rows <= columns:
        return scale(image_CHW, side, max(side, round(columns * side / rows)))
    return scale(image_CHW, max(side, round(rows * side / columns)), side)


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
