"""Decoding of images by libjpeg-turbo or Pillow, and encoded images as a data set.

Both libraries release the interpreter's lock, so threads decode in parallel. Pillow decodes PNG,
WebP, BMP, JPEGs in CMYK, and JPEGs that libjpeg-turbo alone rejects. Scaling while decoding would
be faster, but costs 8 dB.

The thread that decodes an image also scales and crops it, while it is in its core's cache.
"""

import io
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

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

from firecaffe.data.dataset import BrokenSampleError, Images
from firecaffe.errors import DataError

MAX_PIXELS = 1 << 28
"""Maximum pixels of an image: 0.8 GB decoded. Cameras have up to 200 million."""

# Photos have 2 to 30 pixels per byte. Scanned pages and masks have the most per byte, but hardly
# more than 16 million pixels.
FEW_PIXELS, PIXELS_PER_BYTE = 16_000_000, 256
"""Pixels allowed in any file, and per byte of a file: more is a decompression bomb."""

STRIP_PIXELS = 1 << 20
"""Pixels converted to RGB at a time, so that memory does not hold an image twice."""

MAX_ASPECT_RATIO = 8
"""Largest ratio of sides that is scaled. The rest is cut: it is never seen, and fills memory."""

JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"

DEEP_BITS = 16

CONVERTED_MODES = ("CMYK", "YCCK")

FORMATS = {
    "JPEG": JpegImagePlugin,
    "PNG": PngImagePlugin,
    "WEBP": WebPImagePlugin,
    "BMP": BmpImagePlugin,
}
"""Formats that Pillow may decode, and the modules that register them. Others start programs."""

PILLOW_ERRORS = (
    OSError,
    SyntaxError,  # from a damaged PNG
    ValueError,
    IndexError,
    TypeError,
    struct.error,
    Image.DecompressionBombError,  # only from WebP
)


def decode(content: bytes) -> Tensor:
    """Decode to uint8 RGB of 3 x H x W, channels last. Raises BrokenSampleError, naming no file."""
    if not content:
        raise BrokenSampleError("not a whole image: it is empty")
    if content[:2] == JPEG:
        try:
            rows, columns, space, _ = simplejpeg.decode_jpeg_header(content)
            check_size(rows, columns, len(content))
            if space not in CONVERTED_MODES:
                return torch.from_numpy(simplejpeg.decode_jpeg(content)).permute(2, 0, 1)
        except ValueError:
            pass  # Pillow decides
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
    """Return the bits per value of an encoded image, or of its first bytes."""
    return content[24] if content[:8] == PNG and len(content) > 24 else 8


def open_image(content: bytes) -> Image.Image:
    """Read the header as `Image.open` does, but without its global limit of 179 million pixels."""
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is None or accept(content[:16]):
            return factory(io.BytesIO(content), "")
    raise UnidentifiedImageError(f"no {', '.join(FORMATS)}")


def _pixels(image: Image.Image) -> Tensor:
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
    # Pillow clips the 16 bits of a gray PNG, but not of a color one, at 255.
    if image.mode in ("I", "I;16", "I;16B"):
        values = np.asarray(image, dtype=np.int64).clip(0, 65535) // 257
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def check_size(rows: int, columns: int, file_bytes: int) -> None:
    """Raise BrokenSampleError if a file of that size may not have that many pixels."""
    most = min(MAX_PIXELS, max(FEW_PIXELS, PIXELS_PER_BYTE * file_bytes))
    if not 0 < rows * columns <= most:
        raise BrokenSampleError(
            f"not a whole image: {rows} x {columns} pixels, and more than {most / 1e6:.0f} million "
            f"are not decoded of {file_bytes:,} bytes"
        )


def scale(image_CHW: Tensor, rows: int, columns: int) -> Tensor:
    """Scale bilinearly with antialiasing, as Pillow does (63 dB and more between the two)."""
    if image_CHW.shape[1:] == (rows, columns):
        return image_CHW
    # torch's fast path needs channels last, which a single image shows only by its strides. The
    # copy of a part of an image costs less than the fast path saves.
    image_1CHW = image_CHW.permute(1, 2, 0).contiguous().unsqueeze(0).permute(0, 3, 1, 2)
    scaled = interpolate(image_1CHW, size=(rows, columns), mode="bilinear", antialias=True)
    return scaled.squeeze(0)


def scale_shorter_side(image_CHW: Tensor, side: int) -> Tensor:
    """Scale the shorter side to `side`, after cutting a long side to MAX_ASPECT_RATIO times it."""
    _, rows, columns = image_CHW.shape
    most = MAX_ASPECT_RATIO * min(rows, columns)
    if max(rows, columns) > most:
        top, left = max(0, (rows - most) // 2), max(0, (columns - most) // 2)
        image_CHW = image_CHW[:, top : top + most, left : left + most]
        _, rows, columns = image_CHW.shape
    if rows <= columns:
        return scale(image_CHW, side, max(side, round(columns * side / rows)))
    return scale(image_CHW, max(side, round(rows * side / columns)), side)


IGNORE, APPLY = "ignore", "apply"
EXIF = (IGNORE, APPLY)

UPRIGHT = 1
"""The orientation of an image that needs no rotation, or states none."""

ORIENTATION = 0x0112

MARKS = (b"Exif\0\0", b"eXIf", b"EXIF", b"Raw profile type")
"""Bytes of which a JPEG, PNG or WebP with EXIF data contains at least one."""


def decoded(content: bytes, exif: str) -> Tensor:
    """Decode, and rotate if `exif` is APPLY. Raises BrokenSampleError, naming no file."""
    image_CHW = decode(content)
    return upright(image_CHW, orientation(content)) if exif == APPLY else image_CHW


def orientation(content: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, of an image or its beginning; 1 if it has none."""
    if not any(mark in content for mark in MARKS):
        return UPRIGHT
    try:
        with open_image(content) as image:
            exif_value = image.getexif().get(ORIENTATION, UPRIGHT)
    except PILLOW_ERRORS:
        return UPRIGHT
    return exif_value if exif_value in ORIENTATIONS else UPRIGHT


def upright(image_CHW: Tensor, orientation: int) -> Tensor:
    is_transposed, flipped = ORIENTATIONS[orientation]
    if is_transposed:
        image_CHW = image_CHW.transpose(1, 2)
    return image_CHW.flip(flipped) if flipped else image_CHW


ORIENTATIONS: dict[int, tuple[bool, tuple[int, ...]]] = {
    1: (False, ()),
    2: (False, (2,)),
    3: (False, (1, 2)),
    4: (False, (1,)),
    5: (True, ()),
    6: (True, (2,)),
    7: (True, (1, 2)),
    8: (True, (1,)),
}
"""Per orientation: whether to transpose, then the axes to flip. Source: CIPA DC-008, tag 0x0112."""


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    segment = exif.tobytes()
    return b"".join((JPEG, b"\xff\xe1", struct.pack(">H", len(segment) + 2), segment, jpeg[2:]))


STOP, SKIP = "stop", "skip"
ON_ERROR = (STOP, SKIP)

TO_SKIP = 'data.on_error = "skip" lets the next whole image stand in for it'


def replaced_note(broken: Sequence[str]) -> str:
    """Report that damaged images were replaced. `broken` has the error of each, at least one."""
    return (
        f"{len(broken)} broken images were replaced by the next whole ones; the first: {broken[0]}"
    )


MAX_REPLACED = 100
"""Consecutive damaged images after which the data set counts as damaged."""

PARTS_PER_THREAD = 2
"""Parts of a batch per thread, so that threads that finish early take more."""

FETCHERS = 2
"""Batches made concurrently, so that decoding threads never wait for the end of a batch."""

Transform = Callable[[Tensor, int], Tensor]
"""A function (image, uint8 of 3 x H x W; its place in the batch) -> its row of the batch."""


class Encoded(Protocol):
    """Labeled encoded images, by number. `read` raises DataError."""

    num_classes: int
    class_names: tuple[str, ...]

    @property
    def shard_counts(self) -> tuple[int, ...]:
        """Samples of each shard, in order. Empty if there are no shards."""

    def __len__(self) -> int: ...

    def read(self, sample: int) -> bytes: ...

    def name(self, sample: int) -> str: ...

    def labels(self, samples_B: Tensor) -> Tensor: ...


class EncodedSubset:
    shard_counts: tuple[int, ...] = ()

    def __init__(self, source: Encoded, samples_N: Tensor) -> None:
        self.source, self.samples_N = source, samples_N
        self.num_classes, self.class_names = source.num_classes, source.class_names

    def __len__(self) -> int:
        return len(self.samples_N)

    def read(self, sample: int) -> bytes:
        return self.source.read(int(self.samples_N[sample]))

    def name(self, sample: int) -> str:
        return self.source.name(int(self.samples_N[sample]))

    def labels(self, samples_B: Tensor) -> Tensor:
        return self.source.labels(self.samples_N[samples_B])


def cores() -> int:
    """Return the number of cores that this process may use, by its CPU affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def decode_threads(asked: int) -> int:
    """Return `asked`, or this rank's share of the host's cores if `asked` is 0."""
    if asked:
        return asked
    count = cores()
    is_bound = count < (os.cpu_count() or count)  # a bound rank's cores are its share already
    return count if is_bound else max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def thread_parts(count: int, threads: int) -> list[range]:
    """Divide a batch's places. Submitting them one by one costs a twentieth of decoding's time."""
    length = max(1, count // (PARTS_PER_THREAD * threads))
    return [range(count)[at : at + length] for at in range(0, count, length)]


class StoredSet(Images):
    fetchers = 1

    def __init__(self, source: Encoded, sample_CHW: tuple[int, int, int]) -> None:
        self.source, self.sample_CHW = source, sample_CHW
        self.num_classes, self.class_names = source.num_classes, source.class_names
        self.shard_counts = source.shard_counts

    def __len__(self) -> int:
        return len(self.source)

    @property
    def targets(self) -> Tensor:
        return self.source.labels(torch.arange(len(self)))


class DecodedSet(StoredSet):
    """Encoded images resized to resize x resize. Batches raise DataError for a damaged image."""

    fetchers = FETCHERS

    def __init__(
        self,
        source: Encoded,
        resize: int,
        threads: int = 0,
        on_error: str = STOP,
        exif: str = IGNORE,
    ) -> None:
        super().__init__(source, (3, resize, resize))
        self.on_error, self.exif = on_error, exif
        self.threads = decode_threads(threads)
        self.skipped: dict[int, str] = {}
        """Damaged images that were replaced, and the error of each."""
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decode")

    def subset(self, samples_N: Tensor) -> "DecodedSet":
        source, side = EncodedSubset(self.source, samples_N), self.sample_CHW[1]
        return DecodedSet(source, side, self.threads, self.on_error, self.exif)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        _, rows, columns = self.sample_CHW
        return self.transformed(indices_B, lambda image, _: scale(image, rows, columns))

    def transformed(
        self, indices_B: Tensor, transform: Transform, side: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Make a batch of images by `transform`, of side x side; side 0: of `sample_CHW`."""
        shape = (3, side, side) if side else self.sample_CHW
        # Channels last, as images are decoded. Normalization changes the layout on the device.
        images_BCHW = torch.empty(
            len(indices_B), *shape, dtype=torch.uint8, memory_format=torch.channels_last
        )
        samples = indices_B.tolist()

        def some(places: range) -> list[int]:
            return [self._one(transform, images_BCHW, place, samples[place]) for place in places]

        parts = thread_parts(len(samples), self.threads)
        used = [number for part in self._pool.map(some, parts) for number in part]
        return images_BCHW, self.source.labels(torch.tensor(used, dtype=torch.int64))

    def _one(self, transform: Transform, images_BCHW: Tensor, place: int, sample: int) -> int:
        for number in range(sample, sample + MAX_REPLACED):
            number %= len(self)
            try:
                images_BCHW[place] = transform(self._decoded(number), place)
                return number
            except BrokenSampleError as error:
                if self.on_error == STOP:
                    raise BrokenSampleError(f"{error}; {TO_SKIP}") from error.__cause__
                self.skipped[number] = str(error)
        raise DataError(
            f"{self.skipped[sample]}; and so are the {MAX_REPLACED - 1} after it: the data set "
            "is broken, not an image"
        )

    def _decoded(self, sample: int) -> Tensor:
        content = self.source.read(sample)
        try:
            return decoded(content, self.exif)
        except BrokenSampleError as error:
            raise BrokenSampleError(f"{self.source.name(sample)}: {error}") from error.__cause__

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
