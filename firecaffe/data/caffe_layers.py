"""Settings of a Caffe network's data layers: where samples lie, and how they are transformed.

The transform is crop, mirror, (pixel - mean) * scale, in float32. This order gives Caffe's bits.
Random numbers are drawn by (seed, epoch, sample), with the formulas of `augment`, so they are the
same on any number of workers and for each top of a sample.

Source: BVLC/caffe, src/caffe/proto/caffe.proto, src/caffe/layers/*_data_layer.cpp and
src/caffe/data_transformer.cpp.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from firecaffe.caffe.message import Message
from firecaffe.data.augment import STREAMS
from firecaffe.data.caffe_records import COLOR, GRAY, NATIVE, Pixels
from firecaffe.data.dataset import shape_text
from firecaffe.data.hash import hash64, upper_bits
from firecaffe.errors import DataError

BACKENDS = ("LEVELDB", "LMDB")
"""Backends by enum value. The first is the default of a Data layer."""

PARAMS = ("transform_param", "data_param", "image_data_param", "hdf5_data_param")

REFUSED = {
    "MemoryData": "is filled by a program",
    "WindowData": "cuts windows out of images, which is not done here",
    "DummyData": "holds no samples of anyone's",
    "Python": "is a separate program",
    "Input": "takes what a program gives it",
}
"""Data layers whose data are in no file, and why they are refused."""

INPUT_LAYERS = ("DummyData", "Input", "MemoryData")
"""Refused layers that only declare an input: the network loses nothing without them."""

CONVERT = (
    "backend is LEVELDB, which is not read; convert it to an LMDB: make it anew by "
    "convert_imageset --backend=lmdb, or copy every key and value, which are the same, and say "
    "backend: LMDB"
)

INSTEAD = (
    "expected Data, ImageData or HDF5Data; data of your own have a function, data.name = "
    '"path/file.py:function"'
)


Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Transform:
    scale: float = 1.0
    mirror: bool = False
    crop: int = 0
    """Side of the crop: random in TRAIN, central in TEST. 0: none."""
    mean_file: str = ""
    mean_values: tuple[float, ...] = ()

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
    """Draw three 63-bit numbers per sample: top, left and mirror, before the modulo operation."""
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
        """Return the new shape. Raises DataError, naming no file, if the settings do not fit."""
        channels, rows, columns = image_CHW.shape
        crop, mean = self.transform.crop, self.mean_CHW
        if crop > min(rows, columns):
            raise DataError(
                f"is {rows} x {columns}, and crop_size is {crop}; expected an image at least as "
                "large"
            )
        if mean is not None and mean.shape != image_CHW.shape:
            raise DataError(
                f"is {shape_text(image_CHW.shape)}, and the mean of {self.transform.mean_file} "
                f"{shape_text(mean.shape)}; expected the same"
            )
        if len(self.mean_C11) not in (0, 1, channels):
            raise DataError(
                f"has {channels} channels, and there are {len(self.mean_C11)} mean_value; "
                "expected one for all, or one for each"
            )
        return (channels, crop, crop) if crop else (channels, rows, columns)

    def write(self, to_CHW: Floats, image_CHW: Pixels, draw: list[int] | None) -> None:
        """Write a transformed image. Without `draw`: center, not mirrored, of one or a batch."""
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


@dataclass(frozen=True)
class DataLayer:
    layer: Message
    type: str
    tops: tuple[str, ...]
    source: str
    batch_size: int
    """Caffe's batch size per GPU."""
    transform: Transform = field(default_factory=Transform)
    color: str = NATIVE
    root_folder: str = ""
    """ImageData: a prefix of each path in the list."""
    new_HW: tuple[int, int] | None = None
    """ImageData: the size to which images are resized before they are cropped."""
    is_in_order: bool = True
    backend: str = "LMDB"

    @property
    def words(self) -> str:
        """Description of the transform of the samples, which users see and which identifies it."""
        parts = {
            str(self.transform): True,
            f"{self.color}": self.color != NATIVE,
            f"resized to {self.new_HW}": self.new_HW is not None,
        }
        return ", ".join(word for word, is_said in parts.items() if is_said)


def data_layers(layers: Sequence[Message]) -> list[DataLayer]:
    """Return the data layers of one phase. Raises CaffeError if one is unsupported or invalid."""
    return [_READ[kind](layer) for layer in layers if (kind := _kind(layer)) in _READ]


def _kind(layer: Message) -> str:
    kind = layer.text("type")
    if layer.has("bottom") or kind not in {*_READ, *REFUSED}:
        return ""
    if kind in REFUSED:
        raise layer.error(f"a data layer of type {kind} {REFUSED[kind]}; {INSTEAD}")
    return kind


def _data(layer: Message) -> DataLayer:
    param, of_pixels = layer.message("data_param"), layer.message("transform_param")
    param.ignore("prefetch", "rand_skip", "cache")  # cache and shuffle exist only in a fork
    is_color = of_pixels.flag("force_color") or param.flag("force_encoded_color")
    is_gray = of_pixels.flag("force_gray")
    if is_color and is_gray:
        raise of_pixels.error("force_color and force_gray are both true; expected one of them")
    return DataLayer(
        layer,
        "Data",
        _tops(layer, 2),
        *_where(layer, param),
        transform=_transform(of_pixels),
        color=COLOR if is_color else GRAY if is_gray else NATIVE,
        is_in_order=not param.flag("shuffle"),
        backend=param.choice("backend", BACKENDS, BACKENDS[0]),
    )


def _image_data(layer: Message) -> DataLayer:
    param, of_pixels = layer.message("image_data_param"), layer.message("transform_param")
    param.ignore("rand_skip")
    of_pixels.ignore("force_color", "force_gray")  # is_color decides
    rows, columns = param.integer("new_height"), param.integer("new_width")
    if (rows > 0) != (columns > 0) or min(rows, columns) < 0:
        raise param.error(
            f"new_height is {rows} with new_width {columns}; expected both from 1, or neither"
        )
    return DataLayer(
        layer,
        "ImageData",
        _tops(layer, 2),
        *_where(layer, param),
        transform=_transform(of_pixels),
        color=COLOR if param.flag("is_color", default=True) else GRAY,
        root_folder=param.text("root_folder"),
        new_HW=(rows, columns) if rows else None,
        is_in_order=not param.flag("shuffle"),
    )


def _hdf5_data(layer: Message) -> DataLayer:
    param = layer.message("hdf5_data_param")
    if layer.has("transform_param"):
        raise layer.error(
            "HDF5Data takes no transform_param, in Caffe neither: the numbers are taken as the "
            "files have them",
            "transform_param",
        )
    where = _where(layer, param)
    is_in_order = not param.flag("shuffle")
    return DataLayer(layer, "HDF5Data", _tops(layer), *where, is_in_order=is_in_order)


_READ = {"Data": _data, "ImageData": _image_data, "HDF5Data": _hdf5_data}


def _tops(layer: Message, most: int | None = None) -> tuple[str, ...]:
    tops = tuple(layer.texts("top"))
    if not tops or (most is not None and len(tops) > most):
        expected = "1 or more" if most is None else f"1 to {most}"
        raise layer.error(f"has {len(tops)} tops; expected {expected}")
    return tops


def _where(layer: Message, param: Message) -> tuple[str, int]:
    source, batch_size = param.text("source"), param.integer("batch_size", 1)
    if not source:
        field_names = (
            ", ".join(dict.fromkeys(setting.name for setting in param.fields)) or "nothing"
        )
        raise layer.error(
            f'a data layer without a source, with {field_names}; expected source: "…"'
        )
    if batch_size < 1:
        raise param.error(f"batch_size is {batch_size}; expected 1 or more")
    return source, batch_size


def _transform(param: Message) -> Transform:
    transform = Transform(
        scale=param.number("scale", 1.0),
        mirror=param.flag("mirror"),
        crop=param.integer("crop_size"),
        mean_file=param.text("mean_file"),
        mean_values=tuple(param.numbers("mean_value")),
    )
    if transform.crop < 0:
        raise param.error(f"crop_size is {transform.crop}; expected 0 or more")
    if transform.mean_file and transform.mean_values:
        raise param.error("mean_file and mean_value are both given; expected one of them")
    return transform


def check_understood(layer: DataLayer) -> None:
    """Raise CaffeError for data settings that nothing has read: the samples would differ."""
    for name, line in layer.layer.unread():
        if name.partition(".")[0] in PARAMS:
            raise layer.layer.error(f"{name} is not understood; the data would be others", line)
