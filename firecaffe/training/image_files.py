"""Image files as a run's evaluation gives its network images: decoded, scaled, cut, normalized."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from firecaffe.data import DataConfig
from firecaffe.data.augment import center_crop, normalize
from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.decode import FORMATS, decode, scale
from firecaffe.data.folder import SUFFIXES, kind_of, notes_of, read_image_file
from firecaffe.data.random_resized_crop import middle
from firecaffe.errors import DataError, RecipeError
from firecaffe.training.about import About

GRAY = (19595, 38470, 7471)
"""What red, green and blue weigh in gray, of 65536. Source: ITU-R BT.601, as Pillow rounds it."""


def list_images(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files, and the images in folders, by name; and a line for each folder with files that are
    left out. Raises: DataError if something is not there.
    """
    found: list[Path] = []
    unread: dict[str, Counter[str]] = {}
    for word in words:
        path = Path(word)
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if not each.name.startswith("."))
            images = [each for each in inside if each.suffix.lower() in SUFFIXES]
            others = (each for each in inside if each.suffix.lower() not in SUFFIXES)
            unread[word] = Counter(kind_of(each.name) for each in others if each.is_file())
            if not images:
                raise DataError(
                    f"{path}: holds no images ({unread[word].total()} other files), expected files "
                    f"in {', '.join(SUFFIXES)}"
                )
            found += images
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"{path}: there is no such image or folder")
    return found, notes_of(unread)


def check_takes_images(about: About) -> None:
    """Raises: RecipeError if the run's inputs are not made of image files by firecaffe."""
    if about.sample_CHW and about.sample_CHW[0] in (1, 3):
        return
    shape = "x".join(map(str, about.input_shape)) or "no one tensor"
    raise RecipeError(
        f"the run's inputs ({shape}) are made by a data set of one's own, so predict does not know "
        "how an image becomes one; leave IMAGES out and name data: --data.name, --data.path"
    )


def read_image(path: Path, about: About, config: DataConfig) -> Tensor:
    """One image, uint8 of C x H x W, scaled and cut as a test image of the run's data.

    Raises: DataError if it cannot be read, or is broken; it names it.
    """
    try:
        image_CHW = decode(read_image_file(path))
    except BrokenSampleError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            known = ", ".join(FORMATS)
            raise DataError(f"{path}: is no image that is read ({known})") from error
        raise DataError(f"{path}: {error}") from error
    if about.is_decoded and config.augment == "inception":
        return middle(image_CHW, config.resize, config.crop)
    channels, rows, columns = about.sample_CHW
    if channels == 1:
        image_CHW = _gray(image_CHW)
    if about.is_decoded:
        rows = columns = config.resize
    image_1CHW = scale(image_CHW, rows, columns).unsqueeze(0)
    return center_crop(image_1CHW, config.crop, config.pad).squeeze(0)


def as_inputs(images: Sequence[Tensor], config: DataConfig, device: torch.device) -> Tensor:
    """A batch as the network is given it, float32 of B x C x H x W."""
    return normalize(torch.stack(list(images)), config.mean, config.std, device)


def _gray(image_CHW: Tensor) -> Tensor:
    weights_C11 = torch.tensor(GRAY).view(3, 1, 1)
    sum_1HW = (image_CHW.to(torch.int64) * weights_C11).sum(0, keepdim=True)
    return ((sum_1HW + (1 << 15)) >> 16).to(torch.uint8)
