"""The data sets that a recipe may name, and opening one of them.

A new source is a function from `DataConfig` to the parts of a data set, and a row in `DATASETS`.
"""

from collections.abc import Callable
from difflib import get_close_matches

import torch

from firecaffe.data.batches import output_shape
from firecaffe.data.config import DataConfig
from firecaffe.data.hold_out import hold_out
from firecaffe.data.source import (
    Data,
    DataParts,
    check_words,
    open_cifar,
    open_fashion_mnist,
    open_generated,
    open_image_folder,
    open_mnist,
    open_packed,
)
from firecaffe.errors import DataError, RecipeError

DATASETS: dict[str, Callable[[DataConfig], DataParts]] = {
    "fashion-mnist": open_fashion_mnist,
    "mnist": open_mnist,
    "cifar10": open_cifar,
    "folder": open_image_folder,
    "packed": open_packed,
    "generated": open_generated,
}


def open_data(config: DataConfig) -> Data:
    """Open the data set that a recipe names.

    Raises:
        RecipeError: there is no data set of that name, or the recipe's crop, mean or std do not fit
            its images.
        DataError: its files are missing, damaged or not what they should be.
    """
    if config.name not in DATASETS:
        close = get_close_matches(config.name, DATASETS, n=1)
        raise RecipeError(
            f"data.name is {config.name!r}, expected one of {', '.join(DATASETS)}"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    check_words(config)
    return divide(DATASETS[config.name](config), config)


def divide(parts: DataParts, config: DataConfig) -> Data:
    """What a run takes of a data set: validation images are those that the recipe holds out from
    training, else the data set's own, if it has some.

    Raises:
        RecipeError: the recipe's crop, mean, std or hold_out do not fit the images.
        DataError: the parts have images of several shapes.
    """
    train, test, validation, notes = parts
    for name, part in (("test", test), ("validation", validation)):
        if part is not None and part.sample_CHW != train.sample_CHW:
            raise DataError(
                f"{config.name}: training images are {_by(train.sample_CHW)}, {name} images "
                f"{_by(part.sample_CHW)}, expected the same shape"
            )
        if part is not None and part.num_classes > train.num_classes:
            raise DataError(
                f"{config.name}: the {name} images have {part.num_classes} classes, the training "
                f"images {train.num_classes}; expected no others"
            )
    output_shape(train, config)
    choosing = "validation"
    if config.hold_out:
        train, validation = hold_out(train, config.hold_out)
        choosing = "held-out"
    counts = [f"{len(train)} training", f"{len(test)} test"]
    if validation is not None:
        counts.insert(1, f"{len(validation)} {choosing}")
    description = (
        f"{config.name}: {', '.join(counts[:-1])} and {counts[-1]} images, "
        f"{train.num_classes} classes, {_by(train.sample_CHW)}"
    )
    return Data(train, test, description, validation, notes)


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def check_data(config: DataConfig) -> Data:
    """Find out before any rank is started whether the ranks will be able to open the data.

    The data set is opened exactly as a rank does it (a second or less for the sets that are held
    in memory; a folder is listed, not decoded) and the first image of each part is read. Returns
    what was opened.

    Raises:
        RecipeError, DataError: as `open_data`.
    """
    data = open_data(config)
    for dataset in data.parts.values():
        dataset.batch(torch.tensor([0]))
    return data
