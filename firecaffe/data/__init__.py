"""Data: labeled images by number, their order, their augmentation.

A new source is a function from `DataConfig` to a training and a test set, and a row in `DATASETS`.
"""

from collections.abc import Callable
from difflib import get_close_matches

import torch

from firecaffe.data.batches import Batches, eval_batches, output_shape
from firecaffe.data.dataset import Dataset, TensorDataset
from firecaffe.data.hold_out import hold_out, num_held_out
from firecaffe.data.order import SampleOrder, epoch_order
from firecaffe.data.source import (
    Data,
    DataConfig,
    check_words,
    data_home,
    open_cifar,
    open_fashion_mnist,
    open_generated,
    open_image_folder,
    open_mnist,
    open_packed,
    shard_counts,
)
from firecaffe.errors import DataError, RecipeError

__all__ = [
    "DATASETS",
    "Batches",
    "Data",
    "DataConfig",
    "Dataset",
    "SampleOrder",
    "TensorDataset",
    "check_data",
    "data_home",
    "epoch_order",
    "eval_batches",
    "hold_out",
    "num_held_out",
    "open_data",
    "output_shape",
    "shard_counts",
]

DATASETS: dict[str, Callable[[DataConfig], tuple[Dataset, Dataset]]] = {
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
    train, test = DATASETS[config.name](config)
    if train.sample_CHW != test.sample_CHW:
        raise DataError(
            f"{config.name}: training images are {_by(train.sample_CHW)}, test images "
            f"{_by(test.sample_CHW)}, expected the same shape"
        )
    output_shape(train, config)
    tests = "test"
    if config.hold_out:
        train, test = hold_out(train, config.hold_out)
        tests = "held-out training"
    description = (
        f"{config.name}: {len(train)} training and {len(test)} {tests} images, "
        f"{train.num_classes} classes, {_by(train.sample_CHW)}"
    )
    return Data(train, test, description)


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
    for dataset in (data.train, data.test):
        dataset.batch(torch.tensor([0]))
    return data
