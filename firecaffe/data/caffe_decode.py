"""Encoded images as Caffe has them: blue first, of the channels that are asked for.

Which library decodes a JPEG changes some pixels by a few units; all else is OpenCV's arithmetic,
which Caffe reads and resizes by.

Source: OpenCV, modules/imgproc/src/resize.cpp and color_rgb.cpp (fixed point of 11 and 14 bits).
"""

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.decode import JPEG, PILLOW_ERRORS, PNG, check_size, decode, open_image

NATIVE, COLOR, GRAY = "native", "color", "gray"
"""The channels that an image has; three; one."""

GRAY_MODES = ("1", "L", "I", "I;16", "I;16B", "F")
ALPHA_MODES = ("LA", "PA", "RGBA", "La", "RGBa")
"""Pillow's names of pixels."""

Bytes = NDArray[np.uint8]


def decode_bgr(content: bytes, color: str) -> Bytes:
    """1 or 3 x H x W.

    Raises: BrokenSampleError, without a name, if this is no whole image.
    """
    is_jpeg = content[:2] == JPEG
    is_gray = color == GRAY or (color == NATIVE and _is_gray(content, is_jpeg))
    if is_gray and is_jpeg:
        try:
            rows, columns, *_ = simplejpeg.decode_jpeg_header(content)
            check_size(rows, columns, len(content))
            # The Y of the file: not what one gets from its red, green and blue.
            luma_HW1: Bytes = simplejpeg.decode_jpeg(content, "GRAY")
            return luma_HW1.transpose(2, 0, 1)
        except ValueError:
            pass  # as in `decode`
    image_CHW: Bytes = decode(content).numpy()
    if not is_gray:
        return image_CHW[::-1]
    red, green, blue = image_CHW.astype(np.int32)
    if content[:8] == PNG:
        gray = (red * 9797 + green * 19234 + blue * 3737) >> 15
    else:
        gray = (red * 4899 + green * 9617 + blue * 1868 + 8192) >> 14
    return np.asarray(gray, np.uint8)[None]


def _is_gray(content: bytes, is_jpeg: bool) -> bool:
    """Raises: BrokenSampleError if it has an alpha channel, which would be a fourth one."""
    try:
        if is_jpeg:
            return bool(simplejpeg.decode_jpeg_header(content)[2] == "Gray")
        with open_image(content) as image:
            mode = image.mode
    except PILLOW_ERRORS:
        return False  # `decode` says what is wrong
    if mode in ALPHA_MODES:
        raise BrokenSampleError(
            f"has an alpha channel (Pillow's mode {mode}); set force_color or force_gray"
        )
    return mode in GRAY_MODES


def resize(image_CHW: Bytes, rows: int, columns: int) -> Bytes:
    """OpenCV's bilinear resize of bytes: without antialias, in fixed point."""
    if image_CHW.shape[1:] == (rows, columns):
        return image_CHW
    top, bottom, of_top, of_bottom = _weights(image_CHW.shape[1], rows)
    left, right, of_left, of_right = _weights(image_CHW.shape[2], columns)

    def across(these_rows: NDArray[np.int64]) -> NDArray[np.int32]:
        lines = image_CHW[:, these_rows].astype(np.int32)
        return (lines[:, :, left] * of_left + lines[:, :, right] * of_right) >> 4

    upper = (across(top) * of_top[:, None]) >> 16
    lower = (across(bottom) * of_bottom[:, None]) >> 16
    return ((upper + lower + 2) >> 2).astype(np.uint8)


def _weights(
    size: int, new_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """For each new pixel its two old ones, and how much of each, in 2048ths."""
    place = ((np.arange(new_size) + 0.5) * (1 / (new_size / size)) - 0.5).astype(np.float32)
    first = np.floor(place).astype(np.int64)
    share = place - first.astype(np.float32)
    weights = [np.rint(each * np.float32(2048)).astype(np.int32) for each in (1 - share, share)]
    # Beyond an edge is the edge.
    return first.clip(0, size - 1), (first + 1).clip(0, size - 1), weights[0], weights[1]
