"""Caffe's transform of an image: crop, mirror, (pixel - mean) * scale, in float32.

This order gives Caffe's bits. Random numbers are drawn by (seed, epoch, sample), with the formulas
of `augment`, so they are the same on any number of workers and for each top of a sample.

Source: BVLC/caffe, src/caffe/data_transformer.cpp.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from firecaffe.data.augment import STREAMS
from firecaffe.data.hash import hash64, upper_bits
from firecaffe.errors import DataError

Pixels = NDArray[np.uint8] | NDArray[np.float32]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Transform:
    scale: float = 1.0
    mirror: bool = False
    crop: int = 0
    """Side of the crop: at random in TRAIN, in the center in TEST. 0: none."""
    mean_file: str = ""
    mean_values: tuple[float, ...] = ()
    """One for all channels, or one for each."""

    def __str__(self) -> str:
        mean = self.mean_file.rpartition("/")[2] or " ".join(f"{m:.9g}" for m in self.mean_values)
        parts = {
            f"crop {self.crop}": self.crop,
            "mirror": self.mirror,
            f"mean {mean}": mean,
            f"scale {self.scale:.9g}": self.scale != 1,
        }
        return ", ".join(word for word, is_said in parts.items() if is_said) or "no transform"


def draws(samples_B: Tensor, seed: int, epoch: int) -> list[list[int]]:
    """Draw three numbers of 63 bits per sample: its top, left and mirror, modulo the choices."""
    drawn: list[list[int]] = upper_bits(hash64(seed, STREAMS, epoch, samples_B), 63).T.tolist()
    return drawn


class Transformer:
    def __init__(
        self, transform: Transform, is_cut_at_random: bool, mean_CHW: Floats | None
    ) -> None:
        self.transform, self.is_cut_at_random = transform, is_cut_at_random
        self.mean_CHW = mean_CHW
        self.mean_C11 = np.array(transform.mean_values, np.float32).reshape(-1, 1, 1)
        self.scale = np.float32(transform.scale)

    @property
    def is_random(self) -> bool:
        return self.transform.mirror or (self.is_cut_at_random and self.transform.crop > 0)

    def shape(self, image_CHW: Pixels) -> tuple[int, int, int]:
        """Return the new shape. Raises DataError, without a name, if the settings do not fit."""
        channels, rows, columns = image_CHW.shape
        crop, mean = self.transform.crop, self.mean_CHW
        if crop > min(rows, columns):
            raise DataError(
                f"is {rows} x {columns}, and crop_size is {crop}; expected an image at least as "
                "large"
            )
        if mean is not None and mean.shape != image_CHW.shape:
            raise DataError(
                f"is {_by(image_CHW.shape)}, and the mean of {self.transform.mean_file} "
                f"{_by(mean.shape)}; expected the same"
            )
        if len(self.mean_C11) not in (0, 1, channels):
            raise DataError(
                f"has {channels} channels, and there are {len(self.mean_C11)} mean_value; "
                "expected one for all, or one for each"
            )
        return (channels, crop, crop) if crop else (channels, rows, columns)

    def write(self, to_CHW: Floats, image_CHW: Pixels, draw: list[int] | None) -> None:
        """Write transformed images. `draw` None: the center, not mirrored, of one or a batch."""
        rows, columns = image_CHW.shape[-2:]
        height, width = to_CHW.shape[-2:]
        top, left = (rows - height) // 2, (columns - width) // 2
        if draw is not None and self.is_cut_at_random:
            top, left = draw[0] % (rows - height + 1), draw[1] % (columns - width + 1)
        cut = (..., slice(top, top + height), slice(left, left + width))
        if draw is not None and self.transform.mirror and draw[2] % 2:
            to_CHW = to_CHW[..., ::-1]
        if self.mean_CHW is not None:
            np.subtract(image_CHW[cut], self.mean_CHW[cut], out=to_CHW)
        elif len(self.mean_C11):
            np.subtract(image_CHW[cut], self.mean_C11, out=to_CHW)
        else:
            to_CHW[...] = image_CHW[cut]
        if self.scale != 1:
            to_CHW *= self.scale


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
