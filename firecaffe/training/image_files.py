"""Files read as samples, as a run's evaluation gives them to its network: images and arrays."""

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from firecaffe.data import DataConfig
from firecaffe.data.augment import center_crop, middle, normalize
from firecaffe.data.caffe_source import reader_of_files
from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.decode import FORMATS, decoded, scale
from firecaffe.data.folder import (
    SUFFIXES,
    is_image,
    kind_of,
    listed,
    notes_of,
    read_image_file,
)
from firecaffe.errors import DataError, RecipeError
from firecaffe.reference import is_caffe
from firecaffe.training.about import About

GRAY = (19595, 38470, 7471)
"""Weights of red, green and blue in gray, of 65536. Source: ITU-R BT.601, as Pillow rounds it."""

ARRAY = ".npy"

Read = Callable[[Path], list[tuple[str, Tensor]]]
"""Reads the samples of a file, each with its name. Raises: DataError, which names the file."""


def list_files(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """List files, with the images and arrays in folders; and lines on others. Raises: DataError."""
    found: list[Path] = []
    unread: dict[str, Counter[str]] = {}
    for word in words:
        path = Path(word)
        if path.is_dir():
            inside = sorted(_files_in(path))
            taken = [each for each in inside if is_image(each.name) or _is_array(each)]
            unread[word] = Counter(kind_of(each.name) for each in set(inside) - set(taken))
            if not taken:
                raise DataError(
                    f"{path}: holds no images ({unread[word].total()} other files), expected files "
                    f"in {', '.join(SUFFIXES)}"
                )
            found += taken
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path}: there is no such image or folder")
    return found, notes_of(unread)


def _files_in(folder: Path) -> Iterator[Path]:
    try:
        inside = listed(folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot be read, {error.strerror}") from error
    for each in inside:
        if each.is_dir(follow_symlinks=False):
            yield from _files_in(Path(each.path))
        elif each.is_file():
            yield Path(each.path)


def _is_array(path: Path) -> bool:
    return path.suffix.lower() == ARRAY


def reader_of(paths: Sequence[Path], about: About, config: DataConfig) -> Read:
    """Return a reader of such files. Raises: RecipeError if inputs are not made from such files."""
    if not about.input_shape and any(map(_is_array, paths)):
        raise RecipeError(
            "the run's inputs are several tensors, which no one array has; leave IMAGES out and "
            "name data: --data.name, --data.path"
        )
    if about.is_decoded and (array := next(filter(_is_array, paths), None)):
        raise RecipeError(f"{array} is an array, and the run's inputs are images that are decoded")
    image = None if all(map(_is_array, paths)) else _image_reader(about, config)

    def read(path: Path) -> list[tuple[str, Tensor]]:
        if image is None or _is_array(path):
            return read_array(path, about, config)
        return [(str(path), image(path))]

    return read


def _image_reader(about: About, config: DataConfig) -> Callable[[Path], Tensor]:
    if is_caffe(config.name):
        make = reader_of_files(config, about.input_shape[0] if about.input_shape else 3)
        return lambda path: _of_caffe(path, make, about)
    if about.sample_CHW and about.sample_CHW[0] in (1, 3):
        return lambda path: read_image(path, about, config)
    shape = "x".join(map(str, about.input_shape)) or "no one tensor"
    raise RecipeError(
        f"the run's inputs ({shape}) are made by a data set of one's own, so predict does not know "
        "how an image becomes one; give arrays of that shape (.npy), or leave IMAGES out and name "
        "data: --data.name, --data.path"
    )


def _of_caffe(path: Path, make: Callable[[bytes], Tensor], about: About) -> Tensor:
    try:
        image_CHW = make(read_image_file(path))
    except BrokenSampleError as error:
        raise _broken(path, error) from error
    except DataError as error:
        raise DataError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    _check_shape(path, image_CHW, about)
    return image_CHW


def _broken(path: Path, error: BrokenSampleError) -> DataError:
    if isinstance(error.__cause__, UnidentifiedImageError):
        return DataError(f"{path}: is no image that is read ({', '.join(FORMATS)})")
    return DataError(f"{path}: {error}")


def _check_shape(path: Path, sample: Tensor, about: About) -> None:
    if tuple(sample.shape) != about.input_shape:
        raise DataError(
            f"{path}: comes to {_by(sample.shape)}; the network takes {_by(about.input_shape)}"
        )


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def read_array(path: Path, about: About, config: DataConfig) -> list[tuple[str, Tensor]]:
    """Read one sample, or several in rows, as the run's data set gives them; images are cropped.

    Several are named by the file and their number. Raises: DataError if the file cannot be read, or
    has another shape or type.
    """
    try:
        array = np.load(io.BytesIO(read_image_file(path)), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:  # as a shape beyond the file
        said = " ".join(str(error).split())
        raise DataError(f"{path}: is no array that is read ({said:.80})") from error
    expected = "uint8" if about.sample_CHW else about.input_dtype
    if array.dtype.name == "float64" and expected == "float32":
        array = array.astype(np.float32)  # numpy's default
    if array.dtype.name != expected:
        raise DataError(f"{path}: is of {array.dtype}; expected {expected}, as the run's samples")
    is_one = array.ndim == len(about.input_shape)
    if not is_one and array.ndim != len(about.input_shape) + 1:
        raise DataError(
            f"{path}: is {_by(array.shape)}; expected {_by(about.input_shape)}, or rows of that"
        )
    samples = torch.from_numpy(np.ascontiguousarray(array[None] if is_one else array))
    is_cut = config.crop or config.pad
    if is_cut and min(samples.shape[-2:]) + 2 * config.pad >= config.crop:
        samples = center_crop(samples, config.crop, config.pad)
    for sample in samples[:1]:
        _check_shape(path, sample, about)
    if not about.sample_CHW and (config.mean or config.std):
        samples = normalize(samples, config.mean, config.std, "cpu")
    return [
        (str(path) if is_one else f"{path}[{number}]", sample)
        for number, sample in enumerate(samples)
    ]


def read_image(path: Path, about: About, config: DataConfig) -> Tensor:
    """Read one image, uint8 of C x H x W, scaled and cropped as in a test. Raises: DataError."""
    try:
        image_CHW = decoded(read_image_file(path), config.exif)
    except BrokenSampleError as error:
        raise _broken(path, error) from error
    if about.is_decoded and config.augment == "inception":
        return middle(image_CHW, config.resize, config.crop)
    channels, rows, columns = about.sample_CHW
    if channels == 1:
        image_CHW = _gray(image_CHW)
    if about.is_decoded:
        rows = columns = config.resize
    image_1CHW = scale(image_CHW, rows, columns).unsqueeze(0)
    return center_crop(image_1CHW, config.crop, config.pad).squeeze(0)


def as_inputs(
    samples: Sequence[Tensor], about: About, config: DataConfig, device: torch.device
) -> Tensor:
    """Return a batch for the network: image bytes become normalized float32 of B x C x H x W."""
    batch = torch.stack(list(samples))
    if about.sample_CHW:
        return normalize(batch, config.mean, config.std, device)
    return batch.to(device)


def _gray(image_CHW: Tensor) -> Tensor:
    weights_C11 = torch.tensor(GRAY).view(3, 1, 1)
    sum_1HW = (image_CHW.to(torch.int64) * weights_C11).sum(0, keepdim=True)
    return ((sum_1HW + (1 << 15)) >> 16).to(torch.uint8)
